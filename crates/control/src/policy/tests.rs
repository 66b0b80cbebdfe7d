//! Rules, placement and decisions on small pictures.

use std::sync::Arc;

use super::place::{Places, Purpose, distance};
use super::tenants::{Bottleneck, candidates, choose};
use super::when::{RULES, View, rule};
use super::which::{Cell, Link, Mechanism, Need, Step, TABLE_1, Tenancy, steps, table_1};
use super::*;
use crate::forecast::set::SeriesSet;
use crate::picture::{Node, NodeState, Partition, Picture};

fn picture(nodes: usize, partitions: &[(&str, f64)]) -> Picture {
    let nodes = (1..=nodes).map(|number| Node::new(format!("n{number}"), 1.0)).collect();
    let partition = |(index, (owner, load)): (usize, &(&str, f64))| Partition {
        bytes: 1_000_000,
        ..Partition::new(format!("t{index}"), *owner, *load)
    };
    Picture { at_s: 10_000.0, nodes, partitions: partitions.iter().enumerate().map(partition).collect() }
}

fn controller(rule: &str, settings: Settings) -> Controller {
    Controller::new(rule, settings).expect("the rule and the planner exist")
}

fn outlook(loads: &[f64]) -> Outlook {
    Outlook { method: "last-value", loads: loads.to_vec(), step_s: 60.0, ..Outlook::default() }
}

/// An outlook with forecasts of single tenants.
fn outlook_of(loads: &[f64], tenants: &[(&str, &[f64])]) -> Outlook {
    let changes = tenants.iter().map(|(name, changes)| ((*name).to_owned(), changes.to_vec()));
    Outlook { changes: Arc::new(changes.collect()), ..outlook(loads) }
}

fn view(at_s: f64, nodes: usize, load: f64, forecast: &[f64]) -> View {
    View {
        at_s,
        nodes,
        load,
        node_capacity: 1.0,
        forecast: forecast.to_vec(),
        step_s: 60.0,
        full_s: 60.0,
        ..View::default()
    }
}

#[test]
fn rules_are_found_by_name() {
    for name in RULES {
        assert_eq!(rule(name).expect("it is registered").name(), name);
    }
    assert!(rule("none").is_none());
    let settings = Settings { planner: "none", ..Settings::default() };
    assert!(Controller::new("planned", settings).is_none(), "an unknown planner is no controller");
}

#[test]
fn thresholds_have_hysteresis_in_level_and_time() {
    let settings = Settings::default();
    let mut rule = rule("thresholds").expect("it is registered");
    let mut wish = |at, load| rule.wish(&view(at, 10, load, &[]), &settings).map(|wish| wish.nodes);
    assert_eq!(wish(0.0, 8.0), None, "80 % must hold for 60 s");
    assert_eq!(wish(30.0, 7.0), None, "70 % resets the time");
    assert_eq!(wish(60.0, 8.0), None);
    assert_eq!(wish(120.0, 8.0), Some(12), "8 CPUs at 72 % need 12 nodes");
    assert_eq!(wish(180.0, 6.0), None, "60 % is between the thresholds");
    assert_eq!(wish(240.0, 4.0), None);
    assert_eq!(wish(800.0, 4.0), None, "560 s are less than ten minutes");
    assert_eq!(wish(840.0, 4.0), Some(6));
}

/// The nodes after some rounds of 5 s. A node takes a minute to start, and is removed at once.
fn nodes_after(rule_name: &str, rounds: u32, now: &View) -> usize {
    let mut rule = rule(rule_name).expect("it is registered");
    let (mut serving, mut starting) = (now.nodes, Vec::<f64>::new());
    for round in 0..rounds {
        let at_s = f64::from(round) * 5.0;
        serving += starting.extract_if(.., |begun_s| at_s - *begun_s >= 60.0).count();
        let view = View { at_s, nodes: serving + starting.len(), joining: starting.len(), ..now.clone() };
        let wish = rule.wish(&view, &Settings::default()).map_or(view.nodes, |wish| wish.nodes);
        starting.extend(vec![at_s; wish.saturating_sub(view.nodes)]);
        serving -= view.nodes.saturating_sub(wish);
    }
    serving + starting.len()
}

#[test]
fn no_node_is_added_while_others_start() {
    let late = View { late_share: 1.0, ..view(0.0, 10, 6.0, &[]) };
    assert_eq!(nodes_after("thresholds", 60, &late), 12, "late for a minute, and again after the start");
    assert_eq!(nodes_after("thresholds", 10_000, &late), 13, "more would be below 46 %, and none is removed");
    assert_eq!(nodes_after("forecast", 10_000, &late), 13);
    let over = View { share_above: 0.2, ..view(0.0, 10, 6.0, &[]) };
    assert_eq!(nodes_after("node-share", 12, &over), 11);
    assert_eq!(nodes_after("watermarks", 12, &view(0.0, 10, 20.0, &[])), 11, "one at a time");
    assert_eq!(nodes_after("forecast", 12, &view(0.0, 10, 6.0, &[7.9])), 11);
    assert_eq!(
        nodes_after("thresholds", 30, &view(0.0, 10, 9.0, &[])),
        13,
        "nine CPUs at 72 % need 13 nodes"
    );
}

#[test]
fn e_store_changes_one_node_per_round() {
    let mut rule = rule("watermarks").expect("it is registered");
    let mut wish = |load| rule.wish(&view(0.0, 10, load, &[]), &Settings::default()).map(|wish| wish.nodes);
    assert_eq!([wish(9.5), wish(8.0), wish(2.0)], [Some(11), None, Some(9)]);
}

#[test]
fn elastras_adds_nodes_if_a_share_is_overloaded() {
    let mut rule = rule("node-share").expect("it is registered");
    let mut wish = |share_above| {
        let view = View { share_above, ..view(0.0, 10, 6.0, &[]) };
        rule.wish(&view, &Settings::default()).map(|wish| wish.nodes)
    };
    assert_eq!([wish(0.05), wish(0.1)], [None, Some(11)]);
}

#[test]
fn a_forecast_crossing_acts_ahead() {
    let mut forecast = rule("forecast").expect("it is registered");
    let rising = view(0.0, 10, 6.0, &[6.5, 7.0, 7.9]);
    let wish = forecast.wish(&rising, &Settings::default()).expect("the load will cross 77 %");
    assert_eq!(wish.nodes, 11);
    assert!(matches!(wish.reasons[0], Reason::Forecast { in_s: 180.0, .. }), "{:?}", wish.reasons);
    let mut reactive = rule("thresholds").expect("it is registered");
    assert_eq!(reactive.wish(&rising, &Settings::default()), None, "nothing is above a threshold yet");
}

#[test]
fn planned_removals_must_be_confirmed() {
    let mut planned = rule("planned").expect("it is registered");
    let mut wish = |at_s, load| {
        let falling = view(at_s, 10, load, &[load; 12]);
        planned.wish(&falling, &Settings::default()).map(|wish| wish.nodes)
    };
    assert_eq!([wish(0.0, 3.0), wish(300.0, 4.0), wish(599.0, 3.0)], [None; 3], "ten minutes");
    assert_eq!(wish(600.0, 3.0), Some(6), "four CPUs were seen meanwhile");
    assert_eq!([wish(0.0, 3.0), wish(900.0, 3.0)], [None; 2], "P-Store waits for three rounds");
    assert_eq!(wish(1800.0, 3.0), Some(5));
    let mut rule = rule("planned").expect("it is registered");
    let overloaded = view(0.0, 10, 9.0, &[3.0; 12]);
    let wish = rule.wish(&overloaded, &Settings::default()).map(|wish| wish.nodes);
    assert_eq!(wish, Some(13), "nine CPUs at 72 % need 13 nodes, whatever is forecast");
    let limited = Settings { max_nodes: 11, ..Settings::default() };
    let rising = view(0.0, 10, 9.0, &[9.0; 12]);
    assert_eq!(rule.wish(&rising, &limited).map(|wish| wish.nodes), Some(11));
}

#[test]
fn limits_hold_whatever_the_load_is() {
    let picture = picture(2, &[("n1", 0.6), ("n2", 0.6)]);
    let decide = |min_nodes, max_nodes| {
        let settings = Settings { min_nodes, max_nodes, ..Settings::default() };
        controller("thresholds", settings).decide(&picture, &outlook(&[]))
    };
    assert!(decide(1, 9).is_empty(), "60 % is between the thresholds");
    let added = decide(3, 9);
    assert!(matches!(added[0].action, Action::AddNodes { count: 1 }), "{added:?}");
    assert_eq!(added[0].reasons, [Reason::NodeLimit { nodes: 2, limit: 3 }]);
    let drained = decide(1, 1);
    assert!(matches!(&drained[0].action, Action::Drain { nodes } if nodes.len() == 1), "{drained:?}");
}

#[test]
fn forbidden_nodes_without_tenants_are_not_capacity() {
    let mut picture = picture(3, &[("n2", 0.85), ("n3", 0.85)]);
    let decide = |picture: &Picture| {
        let settings = Settings { hold_up_s: 0.0, ..Settings::default() };
        controller("thresholds", settings).decide(picture, &outlook(&[]))
    };
    let adds = |decision: &Decision| matches!(decision.action, Action::AddNodes { .. });
    assert!(!decide(&picture).iter().any(adds), "57 % of three nodes");
    picture.nodes[0].unsuitable = true;
    assert!(!decide(&picture).iter().any(adds), "n1 will be suitable again");
    picture.nodes[0].forbidden = true;
    assert!(decide(&picture).iter().any(adds), "85 % of two nodes");
    // Nothing would be gained if it were drained, before or instead of others.
    let settings = Settings { max_nodes: 1, ..Settings::default() };
    let drained = controller("thresholds", settings).decide(&picture, &outlook(&[]));
    assert!(matches!(&drained[0].action, Action::Drain { nodes } if nodes == &["n2"]), "{drained:?}");
    // No node counts: the others say what a new one is worth.
    (picture.nodes[1].state, picture.nodes[2].state) = (NodeState::Draining, NodeState::Draining);
    let added = decide(&picture);
    let count = added.iter().find_map(|decision| match decision.action {
        Action::AddNodes { count } => Some(count),
        _ => None,
    });
    assert_eq!(count, Some(3), "1.7 CPUs at 72 %: {added:?}");
}

#[test]
fn fixed_nodes_are_not_drained() {
    let mut picture = picture(3, &[("n1", 0.1), ("n2", 0.2), ("n3", 0.3)]);
    picture.nodes[0].fixed = true;
    let settings = Settings { max_nodes: 1, ..Settings::default() };
    let decisions = controller("thresholds", settings).decide(&picture, &outlook(&[]));
    let Action::Drain { nodes } = &decisions[0].action else { panic!("{decisions:?}") };
    assert_eq!(nodes, &["n2", "n3"], "an operator has added n1, so it is for an operator to remove it");
}

#[test]
fn the_cheaper_tenant_moves_away() {
    let mut picture = picture(2, &[("n1", 0.5), ("n1", 0.5), ("n1", 0.1)]);
    picture.partitions[0].bytes = 10_000_000_000;
    picture.partitions[1].bytes = 5_000_000_000;
    picture.partitions[2].bytes = 5_000_000_000;
    let mut planning = planners::Settings::default();
    let ranked = candidates(&picture, "n1", Bottleneck::Cpu, &planning);
    let names: Vec<&str> = ranked.iter().map(|candidate| candidate.partition.name.as_str()).collect();
    assert_eq!(names, ["t1", "t0", "t2"], "ShuttleDB's example: the tenant of 5 GB before that of 10 GB");
    assert_eq!(choose(&ranked, 0.4).len(), 1);
    assert_eq!(choose(&ranked, 0.7).len(), 2);
    planning.cost = CostModel { fixed_s: 1000.0, ..CostModel::default() };
    let slow = candidates(&picture, "n1", Bottleneck::Cpu, &planning);
    assert!((slow[0].cost - 1050.0).abs() < 1e-6, "as long as the moves that were measured: {slow:?}");
    picture.partitions[1].pinned = true;
    picture.partitions[0].moved_at_s = Some(9_500.0);
    assert_eq!(
        candidates(&picture, "n1", Bottleneck::Cpu, &planning).len(),
        1,
        "pinned and cooling tenants stay"
    );
    picture.partitions[2].memory = 7;
    assert_eq!(candidates(&picture, "n1", Bottleneck::Memory, &planning)[0].benefit, 7.0);
}

#[test]
fn tenants_go_to_near_nodes_first() {
    let mut picture = picture(5, &[("n1", 0.3), ("n2", 0.4), ("n3", 0.1), ("n4", 0.6), ("n1", 0.6)]);
    let places = [("eu", "a"), ("eu", "b"), ("us", "a"), ("eu", "b"), ("us", "a")];
    for (node, (site, rack)) in picture.nodes.iter_mut().zip(places) {
        (node.site, node.rack) = (site.to_owned(), rack.to_owned());
    }
    assert_eq!([1, 2, 0].map(|node| distance(&picture.nodes[0], &picture.nodes[node])), [1, 2, 0]);
    let tenant = picture.partitions[0].clone();
    let name = |picture: &Picture, purpose| {
        Places::new(picture).place(&tenant, purpose, 0.95).map(|node| node.name.clone())
    };
    assert_eq!(name(&picture, Purpose::Relief).as_deref(), Some("n2"), "the less loaded one of the site");
    picture.nodes[1].forbidden = true;
    picture.nodes[3].state = NodeState::Draining;
    assert_eq!(name(&picture, Purpose::Relief).as_deref(), Some("n5"), "the site is full: another one");
    assert_eq!(
        Places::new(&picture).place_new(0).map(|node| node.name.as_str()),
        Some("n5"),
        "the least loaded node"
    );
    let mut places = Places::new(&picture);
    let twice =
        [0.9, 0.9].map(|high| places.place(&tenant, Purpose::Relief, high).map(|node| node.name.as_str()));
    assert_eq!(twice, [Some("n5"), Some("n3")], "a placed tenant counts at its new node");
    picture.nodes.iter_mut().for_each(|node| node.forbidden = true);
    assert_eq!(name(&picture, Purpose::Relief), None);
}

#[test]
fn relief_does_not_exchange_one_loaded_node_for_another() {
    let mut picture = picture(2, &[("n1", 0.2), ("n1", 0.5), ("n2", 0.5)]);
    let tenant = picture.partitions[0].clone();
    let has_place = |picture: &Picture| Places::new(picture).place(&tenant, Purpose::Relief, 0.95).is_some();
    assert!(!has_place(&picture), "n2 would be used as much as n1 is now");
    picture.partitions[2].load = 0.46;
    assert!(!has_place(&picture), "4 % less is less than the loads vary");
    picture.partitions[2].load = 0.4;
    assert!(has_place(&picture));
}

#[test]
fn tenant_that_needs_more_than_a_node_is_extracted_to_the_emptiest_one() {
    let mut picture = picture(3, &[("n1", 0.9), ("n1", 0.1), ("n2", 0.3), ("n3", 0.04)]);
    let tenant = picture.partitions[0].clone();
    let place = |picture: &Picture, purpose| {
        Places::new(picture).place(&tenant, purpose, 0.77).map(|node| node.name.clone())
    };
    assert_eq!(place(&picture, Purpose::Relief), None, "none has room");
    assert_eq!(place(&picture, Purpose::Extraction).as_deref(), Some("n3"));
    picture.partitions[3].load = 0.1;
    assert_eq!(place(&picture, Purpose::Extraction), None, "it would not have more there");
}

#[test]
fn table_1_covers_every_cell() {
    for need in [Need::ScaleUp, Need::ScaleOut, Need::ScaleBack] {
        for link in [Link::Lan, Link::Wan] {
            for tenancy in [Tenancy::Dedicated, Tenancy::Shared] {
                let cell = Cell { tenancy, need, link };
                assert!(!table_1(cell).is_empty(), "{cell:?}");
                let (steps, missing) = steps(cell);
                let is_possible = |step: &Step| !matches!(step, Step::Use(mechanism) if !mechanism.exists());
                assert!(steps.iter().all(is_possible), "{cell:?}: a step that does not exist");
                assert!(!(steps.is_empty() && missing.is_empty()), "{cell:?}");
            }
        }
    }
    assert_eq!(TABLE_1.len(), 6);
    let up = Cell { tenancy: Tenancy::Dedicated, need: Need::ScaleUp, link: Link::Lan };
    assert_eq!(steps(up), (vec![Step::Use(Mechanism::MoveMachine)], vec![]));
    let out = Cell { tenancy: Tenancy::Shared, need: Need::ScaleOut, link: Link::Wan };
    assert_eq!(steps(out), (vec![Step::Extract], vec![Mechanism::ReplicateTenant]));
}

#[test]
fn an_overloaded_node_is_balanced_with_reasons_and_effect() {
    let picture = picture(2, &[("n1", 0.5), ("n1", 0.4), ("n2", 0.1)]);
    let decisions = controller("planned", Settings::default()).decide(&picture, &outlook(&[1.0; 4]));
    let [decision] = decisions.as_slice() else { panic!("one decision is expected: {decisions:?}") };
    assert!(matches!(&decision.action, Action::Move { moves, .. } if moves.len() == 1), "{decision:?}");
    assert!(matches!(decision.reasons[0], Reason::Threshold { value, .. } if value > 0.89), "{decision:?}");
    let effect = decision.predicted.moves.expect("moves have a predicted effect");
    assert!(effect.highest < 0.7 && effect.highest_before > 0.89, "{effect:?}");
    let text = serde_json::to_string(decision).expect("a decision can be written");
    assert!(text.contains("\"action\":\"move\"") && text.contains("\"reason\":\"threshold\""), "{text}");
}

#[test]
fn hot_keys_are_reported_and_stay_with_their_tenant() {
    use crate::picture::Piece;
    use crate::planners::ItemKind;

    let settings = || {
        let planning = planners::Settings { whole_partitions: true, ..Settings::default().planning };
        Settings { max_nodes: 2, planning, ..Settings::default() }
    };
    let decide = |picture: &Picture| {
        let decisions = controller("node-share", settings()).decide(picture, &outlook(&[]));
        let is_hot = |one: &Decision| one.reasons.iter().any(|one| matches!(one, Reason::HotKeys { .. }));
        decisions.into_iter().find(is_hot)
    };
    // No tenant can be moved to advantage, but keys could be.
    let mut alone = picture(2, &[("n1", 0.95)]);
    assert!(decide(&alone).is_none(), "no keys are known");
    alone.partitions[0].hot_keys = vec![Piece::new("t 8", 0.1, 0), Piece::new("t 7", 0.5, 0)];
    let decision = decide(&alone).expect("the keys are reported");
    let action = Action::Tenant { tenant: "t0".to_owned(), to: None, steps: Vec::new() };
    assert_eq!(decision.action, action);
    let found = decision.reasons.iter().find_map(|reason| match reason {
        Reason::HotKeys { tenant, keys, highest } => Some((tenant.as_str(), keys.clone(), *highest)),
        _ => None,
    });
    let (tenant, keys, highest) = found.expect("a reason");
    assert_eq!((tenant, keys[0].key.as_str(), keys[0].load, keys.len()), ("t0", "t 7", 0.5, 2));
    assert!(highest < 0.6, "0.95 without the moves of keys: {highest}");
    let missing = Reason::MissingMechanism { mechanism: Mechanism::MoveRows };
    assert!(decision.reasons.contains(&missing), "{decision:?}");

    // Tenants are moved as a whole.
    let mut both = picture(2, &[("n1", 0.5), ("n1", 0.4), ("n2", 0.1)]);
    both.partitions[0].hot_keys = alone.partitions[0].hot_keys.drain(..1).collect();
    let decision = decide(&both).expect("the keys are reported");
    let Action::Move { moves, .. } = &decision.action else { panic!("{decision:?}") };
    assert!(moves.iter().all(|one| one.kind == ItemKind::Partition && one.piece.is_none()), "{moves:?}");
    assert_eq!(moves.len(), 1);
    // The other node's keys are of no interest.
    both.partitions[0].hot_keys.clear();
    both.partitions[2].hot_keys = vec![Piece::new("t 7", 0.05, 0)];
    assert!(decide(&both).is_none());
}

#[test]
fn moves_that_gain_little_are_not_made() {
    let mut picture = picture(2, &[("n1", 0.74), ("n1", 0.04), ("n2", 0.7)]);
    let settings = || Settings { max_nodes: 2, ..Settings::default() };
    let decide = |picture: &Picture| controller("node-share", settings()).decide(picture, &outlook(&[]));
    assert!(decide(&picture).is_empty(), "78 % could become 74 %");
    (picture.partitions[1].load, picture.partitions[2].load) = (0.1, 0.6);
    let moved = decide(&picture);
    assert!(matches!(moved[0].action, Action::Move { .. }), "84 % become 74 %: {moved:?}");
    (picture.partitions[1].load, picture.partitions[2].load) = (0.04, 0.7);
    picture.nodes[0].state = NodeState::Draining;
    let moved = decide(&picture);
    assert!(matches!(moved[0].action, Action::Move { .. }), "a node that leaves is emptied: {moved:?}");
}

#[test]
fn an_overload_must_last_before_tenants_move() {
    let mut picture = picture(2, &[("n1", 0.5), ("n1", 0.2), ("n2", 0.3)]);
    let mut controller = controller("node-share", Settings { max_nodes: 2, ..Settings::default() });
    let mut moves = |at_s: f64, load: f64| {
        (picture.at_s, picture.partitions[1].load) = (at_s, load);
        controller.decide(&picture, &outlook(&[])).len()
    };
    assert_eq!([moves(0.0, 0.2), moves(4.0, 0.4), moves(8.0, 0.2)], [0, 0, 0], "90 % for 4 s");
    assert_eq!([moves(12.0, 0.4), moves(16.0, 0.4), moves(20.0, 0.4)], [0, 0, 1], "90 % for 12 s");
    assert_eq!([moves(24.0, 0.2), moves(84.0, 0.4)], [0, 1], "a round of a minute says enough");
}

#[test]
fn growth_that_is_forecast_counts_before_it_happens() {
    let picture = picture(2, &[("n1", 0.3), ("n1", 0.35), ("n2", 0.1)]);
    let mut controller = controller("thresholds", Settings::default());
    assert!(controller.decide(&picture, &outlook(&[0.75])).is_empty(), "65 % is below the threshold");
    let grown = controller.decide(&picture, &outlook(&[0.75, 1.1]));
    assert!(grown.iter().any(|decision| matches!(decision.action, Action::Move { .. })), "{grown:?}");
}

#[test]
fn a_tenant_that_will_grow_is_moved_ahead() {
    let picture = picture(2, &[("n1", 0.3), ("n1", 0.3), ("n2", 0.3), ("n2", 0.05)]);
    let decide = |outlook: &Outlook| controller("thresholds", Settings::default()).decide(&picture, outlook);
    let total = [1.0, 1.25];
    // Without the tenant's forecast all tenants would grow by a third, which no node notices.
    assert!(decide(&outlook(&[1.0, 1.2])).is_empty());
    let decisions = decide(&outlook_of(&total, &[("t0", &[0.05, 0.3])]));
    let [decision] = decisions.as_slice() else { panic!("one decision is expected: {decisions:?}") };
    let Action::Move { moves, .. } = &decision.action else { panic!("{decision:?}") };
    assert!(moves.iter().all(|one| one.from == "n1"), "90 % are expected there: {moves:?}");
    assert!(matches!(decision.reasons[0], Reason::Threshold { value, .. } if value > 0.89), "{decision:?}");
    let expected = Reason::Growth { tenant: "t0".to_owned(), load: 0.3, forecast: 0.6, in_s: 120.0 };
    assert_eq!(decision.reasons[1], expected);
    let effect = decision.predicted.moves.expect("moves have a predicted effect");
    assert!(effect.highest < 0.77 && effect.highest_before > 0.89, "{effect:?}");
}

/// The minute of the fifth day in which a tenant is first moved away from n1, where one tenant's load
/// rises within five minutes at noon every day.
fn minute_of_relief(with_tenants: bool) -> Option<u32> {
    let mut set = SeriesSet::new(60.0, 15);
    let mut controller = controller("thresholds", Settings::default());
    for minute in 0..5 * 1440_u32 {
        let of_day = f64::from(minute % 1440);
        let daily =
            0.1 + 0.4 * ((of_day - 720.0) / 5.0).clamp(0.0, 1.0) * ((900.0 - of_day) / 5.0).clamp(0.0, 1.0);
        let mut picture = picture(2, &[("n1", daily), ("n1", 0.35), ("n2", 0.3)]);
        picture.at_s = f64::from(minute) * 60.0;
        set.observe(&picture);
        if minute % 360 == 0 {
            set.fit_due(|| true);
        }
        if minute < 4 * 1440 {
            continue;
        }
        let changes = if with_tenants { Arc::new(set.changes()) } else { Arc::default() };
        let decisions = controller.decide(&picture, &Outlook::from_set(&set, changes));
        if decisions.iter().any(|decision| matches!(decision.action, Action::Move { .. })) {
            return Some(minute % 1440);
        }
    }
    None
}

#[test]
fn a_node_is_relieved_before_a_tenant_grows_again() {
    let late = minute_of_relief(false).expect("n1 is at 85 % in the afternoon");
    assert!(late > 720, "the growth of all tenants does not show which node it is: {late}");
    let ahead = minute_of_relief(true).expect("n1 is at 85 % in the afternoon");
    assert!((700..720).contains(&ahead), "the rise at noon is known from the days before: {ahead}");
}

#[test]
fn a_forecast_fall_does_not_hide_the_load_of_now() {
    let overloaded = picture(2, &[("n1", 0.5), ("n1", 0.4), ("n2", 0.1)]);
    let falling = outlook_of(&[0.6, 0.3], &[("t0", &[-0.2, -0.4])]);
    let decisions = controller("thresholds", Settings::default()).decide(&overloaded, &falling);
    assert!(matches!(decisions[0].action, Action::Move { .. }), "n1 is at 90 % now: {decisions:?}");
    // The others grow by what the falling one loses.
    let rising = picture(2, &[("n1", 0.3), ("n2", 0.4), ("n2", 0.3)]);
    let decide = |outlook: &Outlook| controller("thresholds", Settings::default()).decide(&rising, outlook);
    assert!(decide(&outlook(&[1.0, 1.0])).is_empty());
    let decisions = decide(&outlook_of(&[1.0, 1.0], &[("t0", &[-0.1, -0.2])]));
    assert!(decisions.iter().any(|decision| matches!(decision.action, Action::Move { .. })), "{decisions:?}");
}

#[test]
fn the_horizon_is_what_two_changes_take() {
    let mut picture = picture(4, &[("n1", 0.3); 20]);
    let settings = Settings { node_start_s: 30.0, ..Settings::default() };
    // 20 moves of 0.2 s and 20 MB at 100 MB/s; a fifth of it for the fifth node.
    assert!((horizon_s(&picture, &settings) - 2.0 * (30.0 + 4.2 / 5.0)).abs() < 1e-9);
    picture.partitions[0].bytes = 100_000_000_000;
    assert!(horizon_s(&picture, &settings) > 2.0 * (30.0 + 1000.0 / 5.0), "moving much data takes long");
}

#[test]
fn forgotten_times_begin_again() {
    let mut controller = controller("thresholds", Settings::default());
    let mut picture = picture(2, &[("n1", 0.76), ("n2", 0.79)]);
    assert!(controller.decide(&picture, &outlook(&[])).iter().all(|one| !is_addition(one)));
    picture.at_s += 3600.0;
    controller.forget_times();
    assert!(
        controller.decide(&picture, &outlook(&[])).iter().all(|one| !is_addition(one)),
        "nothing is known about the last hour"
    );
    picture.at_s += 60.0;
    assert!(controller.decide(&picture, &outlook(&[])).iter().any(is_addition), "60 s above 77 %");
}

fn is_addition(decision: &Decision) -> bool {
    matches!(decision.action, Action::AddNodes { .. })
}

#[test]
fn a_dead_node_is_replaced_once_and_emptied() {
    let mut picture = picture(3, &[("n1", 0.3), ("n2", 0.3), ("n3", 0.3)]);
    picture.nodes[0].state = NodeState::Dead;
    picture.partitions[0].moved_at_s = Some(9_999.0);
    let mut controller = controller("thresholds", Settings::default());
    let first = controller.decide(&picture, &outlook(&[]));
    assert!(matches!(first[0].action, Action::AddNodes { count: 1 }), "{first:?}");
    let moved = |decision: &Decision| matches!(&decision.action, Action::Move { moves, .. } if moves.len() == 1 && moves[0].partition == "t0");
    assert!(first.iter().any(moved), "a dead node's tenant is exempt from its cool-down: {first:?}");
    let second = controller.decide(&picture, &outlook(&[]));
    assert!(!second.iter().any(|decision| matches!(decision.action, Action::AddNodes { .. })), "{second:?}");
}

#[test]
fn a_missing_node_counts_for_the_minimum_until_it_is_dead() {
    let mut picture = picture(3, &[("n1", 0.3), ("n2", 0.3)]);
    let mut controller = controller("thresholds", Settings { min_nodes: 3, ..Settings::default() });
    picture.nodes[2].state = NodeState::Missing;
    assert!(!controller.decide(&picture, &outlook(&[])).iter().any(is_addition), "it may come back");
    picture.nodes[2].state = NodeState::Dead;
    let decisions = controller.decide(&picture, &outlook(&[]));
    let additions: Vec<&Decision> = decisions.iter().filter(|decision| is_addition(decision)).collect();
    assert!(
        matches!(additions[..], [Decision { action: Action::AddNodes { count: 1 }, .. }]),
        "{decisions:?}"
    );
}

#[test]
fn dead_node_without_tenants_does_not_keep_others_from_being_drained() {
    let mut picture = picture(3, &[("n1", 0.1), ("n2", 0.1), ("n3", 0.1)]);
    picture.nodes[2].state = NodeState::Dead;
    let settings = Settings { max_nodes: 1, ..Settings::default() };
    let drains = |picture: &Picture| {
        let decisions = controller("thresholds", settings.clone()).decide(picture, &outlook(&[]));
        decisions.iter().any(|decision| matches!(decision.action, Action::Drain { .. }))
    };
    assert!(!drains(&picture), "its tenant is being failed over");
    picture.partitions.pop();
    assert!(drains(&picture));
}

#[test]
fn a_slow_node_is_replaced_one_at_a_time() {
    let mut picture = picture(3, &[("n1", 0.6), ("n2", 0.6), ("n3", 0.6)]);
    let decide_with = |picture: &Picture, max_nodes: usize| {
        let settings = Settings { min_nodes: 3, max_nodes, ..Settings::default() };
        controller("thresholds", settings).decide(picture, &outlook(&[]))
    };
    let decide = |picture: &Picture| decide_with(picture, 3);
    assert!(decide(&picture).is_empty());
    (picture.nodes[0].slow, picture.nodes[1].slow) = (true, true);
    let added = decide(&picture);
    let [decision] = added.as_slice() else { panic!("one decision is expected: {added:?}") };
    assert!(matches!(decision.action, Action::AddNodes { count: 1 }), "{decision:?}");
    picture.nodes.push(Node { state: NodeState::Joining, ..Node::new("a1", 1.0) });
    assert!(decide(&picture).is_empty(), "it must serve first");
    picture.nodes[3].state = NodeState::Active;
    let drained = decide(&picture);
    let [decision] = drained.as_slice() else { panic!("one decision is expected: {drained:?}") };
    assert_eq!(decision.action, Action::Drain { nodes: vec!["n1".to_owned()] });
    assert_eq!(decision.reasons, [Reason::SlowNode { node: "n1".to_owned() }]);
    let drains = |picture: &Picture| {
        let is_drain = |decision: &Decision| matches!(decision.action, Action::Drain { .. });
        decide_with(picture, 9).iter().any(is_drain)
    };
    assert!(drains(&picture));
    let mut fixed = picture.clone();
    fixed.nodes.iter_mut().for_each(|node| node.fixed = true);
    assert!(!drains(&fixed), "no provisioner can remove it");
    let mut pinned = picture.clone();
    pinned.partitions.iter_mut().for_each(|of| of.pinned = true);
    assert!(!drains(&pinned), "it cannot be emptied");
    picture.partitions.iter_mut().take(2).for_each(|of| of.load = 0.8);
    assert!(!drains(&picture), "it is overloaded");
}

#[test]
fn a_slow_node_that_was_chosen_is_replaced_even_if_it_is_fast_again() {
    let mut picture = picture(3, &[("n1", 0.6), ("n2", 0.6), ("n3", 0.6)]);
    let window = Window { from_s: 0.0, to_s: 20_000.0 };
    let settings = Settings { min_nodes: 3, max_nodes: 3, maintenance: Some(window), ..Settings::default() };
    let mut controller = controller("thresholds", settings);
    picture.nodes[0].slow = true;
    let added = controller.decide(&picture, &outlook(&[]));
    assert!(matches!(added[0].action, Action::AddNodes { count: 1 }), "{added:?}");
    picture.nodes.push(Node::new("a1", 1.0));
    picture.nodes[0].slow = false;
    picture.at_s = 30_000.0;
    assert!(controller.decide(&picture, &outlook(&[])).is_empty(), "outside the maintenance window");
    picture.at_s = 86_400.0;
    let drained = controller.decide(&picture, &outlook(&[]));
    assert_eq!(drained[0].action, Action::Drain { nodes: vec!["n1".to_owned()] });
    // What makes a node slow may have moved to another one.
    picture.nodes.remove(0);
    picture.partitions[0].owner = "a1".to_owned();
    picture.nodes[1].slow = true;
    picture.at_s += 3599.0;
    assert!(controller.decide(&picture, &outlook(&[])).is_empty(), "within an hour");
    picture.at_s += 1.0;
    assert!(!controller.decide(&picture, &outlook(&[])).is_empty());
}

#[test]
fn nodes_are_drained_only_within_the_maintenance_window() {
    let mut picture = picture(4, &[("n1", 0.3), ("n2", 0.2), ("n3", 0.1), ("n4", 0.15)]);
    let window = Window { from_s: 79_200.0, to_s: 7_200.0 };
    let settings = Settings { maintenance: Some(window), hold_down_s: 0.0, ..Settings::default() };
    let mut controller = controller("forecast", settings);
    picture.at_s = 43_200.0;
    assert!(controller.decide(&picture, &outlook(&[0.75; 10])).is_empty(), "noon is outside the window");
    picture.at_s = 86_400.0 + 3_600.0;
    let night = controller.decide(&picture, &outlook(&[0.75; 10]));
    let Action::Drain { nodes } = &night[0].action else { panic!("a drain is expected: {night:?}") };
    assert_eq!(nodes, &["n3", "n4"], "the least loaded nodes; 0.75 CPUs need two");
    assert!(night[0].predicted.mean_after > night[0].predicted.mean_before);
    // The clock was set by twelve hours since the time of the pictures began.
    picture.at_s += 86_400.0;
    controller.set_utc_offset(43_200.0);
    assert!(controller.decide(&picture, &outlook(&[0.75; 10])).is_empty(), "it is noon again");
}

#[test]
fn a_node_that_is_needed_again_is_kept_unless_an_operator_drains_it() {
    let mut picture = picture(3, &[("n1", 0.3), ("n2", 0.2), ("n3", 0.1)]);
    let settings = Settings { hold_down_s: 0.0, min_nodes: 2, ..Settings::default() };
    let mut controller = controller("forecast", settings);
    let first = controller.decide(&picture, &outlook(&[0.6; 10]));
    assert!(matches!(&first[0].action, Action::Drain { nodes } if nodes == &["n3"]), "{first:?}");
    picture.nodes[2].state = NodeState::Draining;
    picture.nodes.push(Node { state: NodeState::Draining, ..Node::new("n4", 1.0) });
    let second = controller.decide(&picture, &outlook(&[2.8; 10]));
    assert!(matches!(&second[0].action, Action::KeepNodes { nodes } if nodes == &["n3"]), "{second:?}");
    assert!(matches!(second[1].action, Action::AddNodes { count: 1 }), "n4 still leaves: {second:?}");
    // The next controller continues its drain.
    let settings = Settings { hold_down_s: 0.0, min_nodes: 2, ..Settings::default() };
    let mut next = Controller::new("forecast", settings).unwrap();
    next.adopt(["n3".to_owned()]);
    let third = next.decide(&picture, &outlook(&[2.8; 10]));
    assert!(matches!(&third[0].action, Action::KeepNodes { nodes } if nodes == &["n3"]), "{third:?}");
}

#[test]
fn a_late_tenant_on_a_calm_node_is_helped_by_table_1() {
    let mut picture = picture(2, &[("n1", 0.4), ("n1", 0.2), ("n2", 0.1)]);
    (picture.partitions[0].latency_ms, picture.partitions[0].objective_ms) = (Some(50.0), Some(20.0));
    let settings = Settings { overloaded_share: 2.0, ..Settings::default() };
    let decisions = controller("thresholds", settings).decide(&picture, &outlook(&[]));
    let [decision] = decisions.as_slice() else { panic!("one decision is expected: {decisions:?}") };
    let Action::Tenant { tenant, to, steps } = &decision.action else { panic!("{decision:?}") };
    assert_eq!((tenant.as_str(), to.as_deref()), ("t0", Some("n2")));
    assert_eq!(steps, &[Step::Use(Mechanism::MoveTenant)]);
    let cell = Cell { tenancy: Tenancy::Shared, need: Need::ScaleUp, link: Link::Lan };
    assert!(decision.reasons.contains(&Reason::Table1(cell)));

    // The neighbour frees half as much in a fiftieth of the time.
    picture.partitions[0].bytes = 1_000_000_000;
    let settings = Settings { overloaded_share: 2.0, ..Settings::default() };
    let cheaper = controller("thresholds", settings).decide(&picture, &outlook(&[]));
    let Action::Tenant { tenant, .. } = &cheaper[0].action else { panic!("{cheaper:?}") };
    assert_eq!(tenant, "t1");
    let is_cheaper = |reason: &Reason| matches!(reason, Reason::CheaperTenant { late, .. } if late == "t0");
    assert!(cheaper[0].reasons.iter().any(is_cheaper), "{cheaper:?}");
}
