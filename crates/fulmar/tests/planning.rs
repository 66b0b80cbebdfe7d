//! `fulmar plan`, `fulmar simulate` and computed figures: results, files and errors.

mod common;

use common::{run, stderr_of_failure, stdout};

fn json(arguments: &[&str]) -> serde_json::Value {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&stdout(&output)).expect("--json prints JSON")
}

#[test]
fn a_plan_lists_the_moves_of_a_picture() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("picture.json");
    let picture = r#"{"nodes": [{"name": "n1", "capacity": 1}, {"name": "n2", "capacity": 1}],
        "partitions": [{"name": "a", "owner": "n1", "load": 0.4, "bytes": 2000000000},
                       {"name": "b", "owner": "n1", "load": 0.4, "bytes": 1000000}]}"#;
    std::fs::write(&file, picture).unwrap();
    let file = file.to_str().unwrap();
    let plans = json(&["plan", "--from", file, "--json"]);
    assert_eq!(plans[0]["plan"]["moves"][0]["partition"], "b", "the smaller tenant moves: {plans}");
    assert_eq!(plans[0]["plan"]["evaluation"]["highest"], 0.4);

    let all = json(&["plan", "--from", file, "--planner", "all", "--json"]);
    assert_eq!(all.as_array().map(Vec::len), Some(6));
    let drained = json(&["plan", "--from", file, "--remove", "1", "--json"]);
    assert_eq!(drained[0]["plan"]["evaluation"]["moves"], 0, "the least loaded node is empty: {drained}");
    let table = stdout(&run(&["plan", "--case", "ycsb-high", "--planner", "all", "--time-limit", "1"]));
    assert!(table.contains("greedy-extended") && table.contains("highest %"), "{table}");
}

#[test]
fn errors_of_a_picture_name_the_file_and_the_rule() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("picture.json");
    std::fs::write(&file, r#"{"nodes": [], "partitions": []}"#).unwrap();
    let error = stderr_of_failure(&run(&["plan", "--from", file.to_str().unwrap()]), 1);
    assert!(error.contains("picture.json: the picture has no nodes"), "{error}");
    let error = stderr_of_failure(&run(&["plan", "--case", "ycsb"]), 1);
    assert!(error.contains("unknown case \"ycsb\"; use large, ycsb-none"), "{error}");
    stderr_of_failure(&run(&["plan"]), 2);
}

#[test]
fn a_simulation_reports_policies_and_draws_a_chart() {
    let directory = tempfile::tempdir().unwrap();
    let (trace, svg) = (directory.path().join("load.csv"), directory.path().join("nodes.svg"));
    let lines: Vec<String> = (0..120).map(|minute| format!("{},{}", minute * 60, 10 + minute / 2)).collect();
    // Without ten minutes in the middle.
    std::fs::write(&trace, [&lines[..60], &lines[70..]].concat().join("\n")).unwrap();
    let (trace, svg) = (trace.to_str().unwrap(), svg.to_str().unwrap());
    let arguments = ["simulate", "--trace", trace, "--nodes", "5", "--tenants", "50", "--svg", svg];
    let report = json(&[arguments.as_slice(), &["--json"]].concat());
    assert_eq!(report["policies"].as_array().map(Vec::len), Some(6));
    assert_eq!(report["holes"][0]["from_s"], 59.0 * 60.0, "{report}");
    let chart = std::fs::read_to_string(svg).unwrap();
    assert!(chart.starts_with("<svg xmlns") && chart.contains("clairvoyant"), "{chart:.300}");
    let table = stdout(&run(&arguments));
    assert!(table.contains("planned") && table.contains("was interpolated"), "{table}");

    let error = stderr_of_failure(&run(&["simulate", "--trace", "cosine"]), 1);
    assert!(error.contains("unknown trace \"cosine\"; use worldcup, sine"), "{error}");
    let damaged = directory.path().join("damaged.csv");
    for (text, rule) in [
        ("0,1\n60,2\n120,x\n", "line 3: expected \"seconds,load\" with two numbers"),
        ("0,1\n60,2\n30,3\n", "line 3: the time must be later than that of the line before"),
        ("0,\n60,\n", "the trace has no load"),
    ] {
        std::fs::write(&damaged, text).unwrap();
        let error = stderr_of_failure(&run(&["simulate", "--trace", damaged.to_str().unwrap()]), 1);
        assert!(error.contains("damaged.csv: ") && error.contains(rule), "{error}");
    }
}

#[test]
fn a_computed_figure_needs_no_server() {
    let directory = tempfile::tempdir().unwrap();
    let page = directory.path().join("figure.html");
    let figure = ["bench", "figure", "estore/14", "-o", page.to_str().unwrap()];
    let csv = stdout(&run(&figure));
    let header = "figure,line,x,throughput_percent,mean_ms,moved_percent,failed";
    assert_eq!(csv.lines().next(), Some(header), "{csv}");
    let last = csv.lines().rfind(|line| line.starts_with("estore/14,\"greedy-extended, high skew\",195,"));
    assert!(last.is_some_and(|line| line.contains(",100.000,")), "six nodes serve the load: {csv}");
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.contains("<svg") && page.contains("Scaling out from five nodes to six"), "{page:.300}");

    let list = stdout(&run(&["bench", "figure", "--list"]));
    for name in ["elastras/31", "thesis/23", "shuttledb/9", "estore/15"] {
        assert!(list.contains(name), "{list}");
    }
    let error = stderr_of_failure(&run(&["bench", "figure", "estore/99"]), 1);
    assert!(error.contains("unknown figure \"estore/99\""), "{error}");
}
