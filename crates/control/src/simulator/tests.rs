//! Simulations of a small cluster: bounds on cost and lateness, and no oscillation.

use super::trace::TRACES;
use super::*;
use crate::policy::when::RULES;

fn simulation(trace: &str, hours: usize) -> Simulation {
    let trace = Trace::named(trace, hours * 60).expect("it is a trace");
    Simulation { nodes: 10, tenants: 200, trace, settings: Settings::default() }
}

#[test]
fn no_tenant_moves_twice_within_its_cool_down() {
    for trace in TRACES {
        let report = simulation(trace, 30).run(&RULES).expect("the rules exist");
        for policy in &report.policies {
            assert_eq!(policy.cool_down_violations, 0, "{trace}, {}", policy.policy);
            assert!(policy.moves > 0, "{trace}, {}: nothing was moved, so nothing was tested", policy.policy);
        }
    }
}

#[test]
fn our_policy_is_cheap_and_in_time_on_periodic_loads() {
    for trace in ["sine", "worldcup"] {
        let report = simulation(trace, 96).run(&["planned", STATIC]).expect("the rules exist");
        let [planned, fixed] = report.policies.as_slice() else { panic!("two policies were asked for") };
        assert!(planned.cost_ratio <= 1.4, "{trace}: {:.3} times the clairvoyant cost", planned.cost_ratio);
        assert!(planned.late_percent <= 1.0, "{trace}: {:.3} % late", planned.late_percent);
        assert!(report.forecast.gain <= 0.8, "{trace}: {:?}", report.forecast);
        assert!((fixed.over_static - 1.0).abs() < 1e-9, "static provisioning is its own reference");
        assert!(planned.node_hours < 0.8 * fixed.node_hours, "{trace}: nodes are given back at night");
    }
}

#[test]
fn runs_are_deterministic() {
    let run = || simulation("spike", 6).run(&["planned"]).expect("the rule exists");
    assert_eq!(run(), run());
}

#[test]
fn unknown_policies_are_refused() {
    assert!(simulation("sine", 1).run(&["none"]).is_none());
}

#[test]
fn holes_of_a_file_are_in_the_report() {
    let lines = (0..60).filter(|minute| !(20..30).contains(minute));
    let text: String = lines.map(|minute| format!("{},{}\n", minute * 60, 50 + minute % 3)).collect();
    let trace = Trace::from_csv(&text).expect("it is valid");
    let simulation = Simulation { trace, ..simulation("sine", 1) };
    let report = simulation.run(&["planned"]).expect("the rule exists");
    assert_eq!(report.holes.len(), 1);
    assert!(
        report.policies[0].nodes_added + report.policies[0].nodes_removed <= 4,
        "a hole must not cause flapping"
    );
}
