//! Decisions for balance, while earlier ones take effect.
//!
//! The loads of nodes are smoothed: for a while they show what a move costs, and not yet what it
//! brings. Nodes whose load is changing are left alone until then. Nodes that have to be emptied or lack
//! memory do not wait.

use std::collections::BTreeSet;

use fulmar_control::plan::Move;
use fulmar_control::policy::{Action, Decision, Reason};

/// The part of a decision that leaves the nodes alone whose load is changing; `None` if nothing is
/// left. `home` is the node of a tenant.
pub(super) fn apart_from(
    changing: &BTreeSet<String>,
    mut decision: Decision,
    home: impl Fn(&str) -> Option<String>,
) -> Option<Decision> {
    let is_required = |reason: &Reason| matches!(reason, Reason::NodesLeave { .. } | Reason::Memory { .. });
    match &mut decision.action {
        Action::Tenant { tenant, to, .. } => {
            let home = home(tenant);
            let is_changing = to.iter().chain(&home).any(|node| changing.contains(node));
            (!is_changing).then_some(decision)
        }
        Action::Move { moves, .. } if !decision.reasons.iter().any(is_required) => {
            let planned = moves.len();
            *moves = remaining(changing, std::mem::take(moves));
            if moves.len() < planned {
                decision.predicted.moves = None;
            }
            (!moves.is_empty()).then_some(decision)
        }
        _ => Some(decision),
    }
}

/// The moves of a plan that are neither from nor to these nodes, nor to a node from which a planned
/// move is left out.
fn remaining(changing: &BTreeSet<String>, mut moves: Vec<Move>) -> Vec<Move> {
    let mut full = changing.clone();
    loop {
        let is_left_out = |one: &Move| changing.contains(&one.from) || full.contains(&one.to);
        let (left_out, kept): (Vec<_>, Vec<_>) = moves.into_iter().partition(is_left_out);
        if left_out.is_empty() {
            return kept;
        }
        full.extend(left_out.into_iter().map(|one| one.from));
        moves = kept;
    }
}

#[cfg(test)]
mod tests {
    use fulmar_control::planners::ItemKind;
    use fulmar_control::policy::Effect;

    use super::*;

    fn planned(from: &str, to: &str) -> Move {
        Move {
            partition: format!("of {from}"),
            kind: ItemKind::Partition,
            piece: None,
            from: from.to_owned(),
            to: to.to_owned(),
            load: 0.1,
            bytes: 1,
            seconds: 0.2,
        }
    }

    fn left(changing: &[&str], reasons: &[Reason]) -> Vec<String> {
        let plan = [planned("n1", "n2"), planned("n2", "n3"), planned("n4", "n1"), planned("n5", "n3")];
        let action = Action::Move { planner: "greedy", moves: plan.to_vec() };
        let decision =
            Decision { at_s: 0.0, action, reasons: reasons.to_vec(), predicted: Effect::default() };
        let changing = changing.iter().map(|name| (*name).to_owned()).collect();
        match apart_from(&changing, decision, |_| None).map(|decision| decision.action) {
            Some(Action::Move { moves, .. }) => moves.into_iter().map(|one| one.from).collect(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn nodes_whose_load_is_changing_are_left_alone() {
        assert_eq!(left(&[], &[]), ["n1", "n2", "n4", "n5"]);
        assert_eq!(left(&["n5"], &[]), ["n1", "n2", "n4"]);
        assert_eq!(left(&["n1"], &[]), ["n2", "n5"]);
        // The move from n2 is left out, so that n2 takes nothing; nor does n1 then.
        assert_eq!(left(&["n3"], &[]), [""; 0]);
        assert_eq!(left(&["n3"], &[Reason::Memory { nodes: 1 }]), ["n1", "n2", "n4", "n5"]);
    }

    #[test]
    fn late_tenant_waits_only_for_its_own_nodes() {
        let help = |changing: &str| {
            let action =
                Action::Tenant { tenant: "shop".to_owned(), to: Some("n2".to_owned()), steps: Vec::new() };
            let decision = Decision { at_s: 0.0, action, reasons: Vec::new(), predicted: Effect::default() };
            let changing = BTreeSet::from([changing.to_owned()]);
            apart_from(&changing, decision, |_| Some("n1".to_owned())).is_some()
        };
        assert!(!help("n1") && !help("n2") && help("n3"));
    }
}
