//! Decisions in words, for operators.

use fulmar_control::policy::which::{Cell, Link, Mechanism, Need, Step, Tenancy};
use fulmar_control::policy::{Action, Effect, HotKey, Reason};

/// How many names a text lists.
const MAX_LISTED: usize = 5;

/// The kind of an action.
pub(super) fn kind(action: &Action) -> &'static str {
    match action {
        Action::AddNodes { .. } => "add-nodes",
        Action::Drain { .. } => "drain",
        Action::KeepNodes { .. } => "keep-nodes",
        Action::Move { .. } => "move",
        Action::Tenant { .. } => "tenant",
    }
}

/// What is to be done.
pub(super) fn what(action: &Action) -> String {
    match action {
        Action::AddNodes { count } => format!("add {}", counted(*count, "node")),
        Action::Drain { nodes } => format!("remove {} {}", plural(nodes.len(), "node"), listed(nodes)),
        Action::KeepNodes { nodes } => format!("keep {} {}", plural(nodes.len(), "node"), listed(nodes)),
        Action::Move { planner, moves } => {
            let each: Vec<String> = moves
                .iter()
                .map(|one| format!("{} from {} to {}", one.partition, one.from, one.to))
                .collect();
            format!("move {} ({planner}): {}", counted(moves.len(), "tenant"), listed(&each))
        }
        Action::Tenant { tenant, to: Some(to), steps } => {
            let is_machine = steps.contains(&Step::Use(Mechanism::MoveMachine));
            let all = if is_machine { ", the only tenant of its node (machine)," } else { "" };
            format!("move {tenant}{all} to {to}")
        }
        Action::Tenant { tenant, to: None, .. } => format!("nothing that can be done helps {tenant}"),
    }
}

/// A reason.
pub(super) fn why(reason: &Reason) -> String {
    match reason {
        Reason::Threshold { quantity, value, threshold, for_s } if *for_s > 0.0 => {
            format!(
                "{quantity} is {} (threshold {}) for {}",
                percent(*value),
                percent(*threshold),
                time(*for_s)
            )
        }
        Reason::Threshold { quantity, value, threshold, .. } => {
            format!("{quantity} is {} (threshold {})", percent(*value), percent(*threshold))
        }
        Reason::Forecast { method, load, capacity, in_s } => format!(
            "the load will be {load:.2} CPUs in {} ({method}); the nodes serve {capacity:.2}",
            time(*in_s)
        ),
        Reason::Growth { tenant, load, forecast, in_s } => {
            format!("{tenant} will grow from {load:.2} to {forecast:.2} CPUs in {}", time(*in_s))
        }
        Reason::NodePlan { from, to, short_s, .. } if *short_s > 0.0 => format!(
            "the cheapest plan goes from {from} to {to} nodes; the load exceeds them for {}",
            time(*short_s)
        ),
        Reason::NodePlan { from, to, .. } => format!("the cheapest plan goes from {from} to {to} nodes"),
        Reason::NodesLeave { nodes } => {
            format!(
                "{} {} or dead: {}",
                plural(nodes.len(), "node"),
                if nodes.len() == 1 { "is drained" } else { "are drained" },
                listed(nodes)
            )
        }
        Reason::NodeLimit { nodes, limit } => {
            format!("{} now; the limits ask for {limit}", counted(*nodes, "node"))
        }
        Reason::SlowNode { node } => format!("{node} has been much slower than the others"),
        Reason::Memory { nodes } => format!("{} over the memory budget", counted(*nodes, "node")),
        Reason::Latency { latency_ms, objective_ms } => {
            format!("latency is {latency_ms:.1} ms, objective {objective_ms:.1} ms")
        }
        Reason::CheaperTenant { late, load, seconds } => {
            format!("moving it frees {load:.2} CPUs for {late} in {seconds:.1} s")
        }
        Reason::HotKeys { tenant, keys, highest } => {
            let each = |key: &HotKey| format!("{} ({:.2} CPUs)", key.key, key.load);
            let keys: Vec<String> = keys.iter().map(each).collect();
            let highest = percent(*highest);
            format!(
                "hot keys of {tenant}: {}; the highest would be {highest} if they could move",
                listed(&keys)
            )
        }
        Reason::NewNodes { nodes } => format!("{} nearly empty", counted(*nodes, "node")),
        Reason::Table1(cell) => table_1(*cell),
        Reason::MissingMechanism { mechanism } => {
            format!("there is no mechanism to {}", mechanism_name(*mechanism))
        }
    }
}

/// The predicted effect.
pub(super) fn predicted(effect: &Effect) -> String {
    let mut text = format!(
        "{} -> {}, mean {} -> {}",
        counted(effect.nodes_before, "node"),
        effect.nodes_after,
        percent(effect.mean_before),
        percent(effect.mean_after)
    );
    if let Some(moves) = &effect.moves {
        text += &format!(
            ", highest {} -> {}, {} in {}",
            percent(moves.highest_before),
            percent(moves.highest),
            size(moves.bytes as f64),
            time(moves.seconds)
        );
    }
    text
}

fn table_1(cell: Cell) -> String {
    let need = match cell.need {
        Need::ScaleUp => "scale up",
        Need::ScaleOut => "scale out",
        Need::ScaleBack => "scale back",
    };
    let tenancy = match cell.tenancy {
        Tenancy::Dedicated => "dedicated",
        Tenancy::Shared => "shared",
    };
    let link = match cell.link {
        Link::Lan => "same site",
        Link::Wan => "another site",
    };
    format!("Table 1: {need}, {tenancy} tenant, {link}")
}

fn mechanism_name(mechanism: Mechanism) -> &'static str {
    match mechanism {
        Mechanism::MoveTenant => "move a tenant",
        Mechanism::MoveMachine => "move a machine",
        Mechanism::ReplicateTenant => "replicate a tenant",
        Mechanism::DropReplica => "drop a replica",
        Mechanism::MoveRows => "move single keys (row-group)",
    }
}

fn plural(count: usize, noun: &str) -> String {
    if count == 1 { noun.to_owned() } else { format!("{noun}s") }
}

pub(super) fn counted(count: usize, noun: &str) -> String {
    format!("{count} {}", plural(count, noun))
}

/// The first names, and the number of the others.
pub(super) fn listed(names: &[String]) -> String {
    let first = names.iter().take(MAX_LISTED).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(MAX_LISTED) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

pub(super) fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn time(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 10.0 => format!("{seconds:.1} s"),
        seconds if seconds < 600.0 => format!("{seconds:.0} s"),
        seconds => format!("{:.0} min", seconds / 60.0),
    }
}

fn size(bytes: f64) -> String {
    format!("{:.1} MiB", bytes / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_are_described() {
        let nodes: Vec<String> = (1..=7).map(|number| format!("n{number}")).collect();
        assert_eq!(what(&Action::AddNodes { count: 1 }), "add 1 node");
        let drain = what(&Action::Drain { nodes: nodes.clone() });
        assert_eq!(drain, "remove nodes n1, n2, n3, n4, n5 and 2 more");
        let to = Some("n2".to_owned());
        let tenant = |steps| Action::Tenant { tenant: "shop".to_owned(), to: to.clone(), steps };
        assert_eq!(what(&tenant(Vec::new())), "move shop to n2");
        let machine = vec![Step::Use(Mechanism::MoveMachine)];
        assert_eq!(what(&tenant(machine)), "move shop, the only tenant of its node (machine), to n2");
        let reason =
            Reason::Threshold { quantity: "mean utilisation", value: 0.8, threshold: 0.77, for_s: 61.0 };
        assert_eq!(why(&reason), "mean utilisation is 80 % (threshold 77 %) for 61 s");
        let leave = Reason::NodesLeave { nodes: nodes[..1].to_vec() };
        assert_eq!(why(&leave), "node is drained or dead: n1");
        let key = |key: &str, load| HotKey { key: key.to_owned(), load };
        let keys = vec![key("item 7", 0.5), key("item 8", 0.25)];
        let hot = Reason::HotKeys { tenant: "shop".to_owned(), keys, highest: 0.62 };
        let expected = "hot keys of shop: item 7 (0.50 CPUs), item 8 (0.25 CPUs); \
                        the highest would be 62 % if they could move";
        assert_eq!(why(&hot), expected);
        let effect =
            Effect { nodes_before: 1, nodes_after: 2, mean_before: 0.9, mean_after: 0.45, moves: None };
        assert_eq!(predicted(&effect), "1 node -> 2, mean 90 % -> 45 %");
    }
}
