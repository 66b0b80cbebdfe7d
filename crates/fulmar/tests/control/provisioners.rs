//! A provisioner that fails, hangs or lies: what it is asked for is undone, and seen in events.

use std::os::unix::fs::PermissionsExt;

use super::*;

/// A program that behaves as the file `behaviour` says, and writes its calls to `calls`.
const PROGRAM: &str = r#"#!/bin/sh
cd "$(dirname "$0")"
echo "$@" >> calls
case "$1 $(cat behaviour)" in
    "list list-fail") echo "no answer from the cloud" >&2; exit 1 ;;
    list*) cat list ;;
    "add fail") echo "quota exceeded" >&2; exit 1 ;;
    "add hang") sleep 1000 ;;
    "add lie") echo "{\"nodes\":[\"$2\"]}" > list ;;
    "remove remove-fail") echo "volume in use" >&2; exit 1 ;;
    "remove remove-hang")
        echo hangs >> calls
        while [ "$(cat behaviour)" = remove-hang ]; do sleep 0.1; done ;;
    "remove remove-lie") ;;
    remove*) if grep -q "\"$2\"" list; then echo '{"nodes":[]}' > list; fi ;;
esac
"#;

pub(super) struct Program {
    directory: tempfile::TempDir,
}

impl Program {
    pub(super) fn new() -> (Program, Vec<String>) {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("provision");
        std::fs::write(&program, PROGRAM).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let flag = format!("command:{}", program.display());
        let program = Program { directory };
        program.list(&[]);
        program.behave("fail");
        (program, vec!["--provisioner".to_owned(), flag])
    }

    /// Replaces a file as a whole, because the program may be reading it.
    fn write(&self, name: &str, contents: &str) {
        let new = self.directory.path().join("new");
        std::fs::write(&new, contents).unwrap();
        std::fs::rename(new, self.directory.path().join(name)).unwrap();
    }

    /// Changes its behaviour.
    pub(super) fn behave(&self, behaviour: &str) {
        self.write("behaviour", behaviour);
    }

    /// How often a call was made.
    pub(super) fn count(&self, call: &str) -> usize {
        self.calls().lines().filter(|line| *line == call).count()
    }

    /// The nodes that it lists.
    pub(super) fn list(&self, nodes: &[&str]) {
        let list = serde_json::json!({ "nodes": nodes });
        self.write("list", &list.to_string());
    }

    fn calls(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("calls")).unwrap_or_default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn provisioner_that_fails_hangs_or_lies_leaves_nothing_behind() {
    let (program, flag) = Program::new();
    let cluster = start(1, flag).await;
    set(&cluster, 0, QUICK);
    set(&cluster, 0, &[("start_timeout", "300ms"), ("provisioner_timeout", "2s"), ("replace_after", "0")]);
    set(&cluster, 0, &[("min_nodes", "2"), ("mode", "on")]);
    for (behaviour, expected) in
        [("fail", "quota exceeded"), ("hang", "no answer within 2s"), ("lie", "does not serve after 300ms")]
    {
        program.behave(behaviour);
        wait_until(behaviour, async || {
            let failures = events(&cluster, "provisioner.failed").await;
            failures.iter().any(|failure| failure.contains(expected))
        })
        .await;
    }
    // Nothing is added any more, and what was begun is undone.
    set(&cluster, 0, &[("min_nodes", "1")]);
    wait_until("the plan is undone", async || shown(&cluster, 0, "plan").await.is_empty()).await;
    assert_eq!(node_states(&cluster, 0).await, ["n1 alive"]);
    wait_until("outcomes", async || {
        // Those of a pause are only recorded.
        let results =
            decisions(&cluster, 0).into_iter().map(|decision| decision["outcome"]["result"].clone());
        let results: Vec<_> = results.filter(|result| *result != "advised").collect();
        !results.is_empty() && results.iter().all(|result| *result == "failed")
    })
    .await;
    assert!(program.calls().contains("remove auto-1"), "{}", program.calls());
    // The cluster works meanwhile and afterwards.
    create(&cluster, &["shop"]).await;
}

/// The event log of a node, which may be the controller. `fulmar.events` has those of the node that
/// serves the system database.
fn event_log(cluster: &Cluster, node: usize) -> String {
    let files = std::fs::read_dir(cluster.data(node).join("events")).into_iter().flatten();
    files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_is_not_removed_is_kept_and_serves() {
    let (program, flag) = Program::new();
    program.list(&["n2"]);
    program.behave("list-fail");
    let mut cluster = start(2, flag).await;
    create(&cluster, &["shop"]).await;
    set(&cluster, 0, QUICK);
    set(&cluster, 0, &[("start_timeout", "300ms"), ("provisioner_timeout", "2s")]);
    set(&cluster, 0, &[("max_nodes", "1"), ("mode", "on")]);
    let fails = async |text: &str| {
        let is_failure = |line: &str| line.contains("provisioner.failed") && line.contains(text);
        wait_until(text, async || (0..2).any(|node| event_log(&cluster, node).lines().any(is_failure))).await;
    };
    // It is not known which nodes can be removed.
    fails("no answer from the cloud").await;
    let listings = program.count("list");
    wait_until("more attempts", async || program.count("list") > listings + 2).await;
    assert_eq!(program.count("remove n2"), 0);
    let behaviours = [
        ("remove-fail", "volume in use"),
        ("remove-hang", "no answer within 2s"),
        ("remove-lie", "it was removed, and still runs"),
    ];
    for (value, (behaviour, expected)) in behaviours.into_iter().enumerate() {
        program.behave(behaviour);
        fails(expected).await;
        wait_for_nodes(&cluster, 0, &["n1 alive", "n2 alive"]).await;
        execute(&cluster, 1, "shop", &format!("INSERT INTO t VALUES ({value})")).await;
    }
    // A call that takes long stops the node in the end.
    set(&cluster, 0, &[("provisioner_timeout", "1h")]);
    let calls = program.count("hangs");
    program.behave("remove-hang");
    wait_until("another attempt", async || program.count("hangs") > calls).await;
    set(&cluster, 0, &[("start_timeout", "1h")]);
    program.behave("work");
    cluster.kill(1).unwrap();
    wait_for_nodes(&cluster, 0, &["n1 alive"]).await;
    let client = try_connect(&cluster.url(0, "shop")).await.unwrap();
    let row = with_timeout("a query", client.query_one("SELECT count(*) FROM t", &[])).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_do_not_wait_for_the_next_round() {
    let (program, flag) = Program::new();
    program.behave("hang");
    let cluster = start(1, flag).await;
    set(&cluster, 0, &[("round", "1h"), ("start_timeout", "1h"), ("min_nodes", "2"), ("mode", "on")]);
    // What the provisioner answers is used in the round after the call.
    let mut changes = 10;
    let mut plan_after_change = async || {
        changes += 1;
        set(&cluster, 0, &[("max_nodes", &changes.to_string())]);
        shown(&cluster, 0, "plan").await
    };
    wait_until("a plan", async || plan_after_change().await == "adding auto-1").await;
    for _ in 0..2 {
        control(&cluster, 0, &["cancel"]);
        wait_until("nothing is left", async || plan_after_change().await.is_empty()).await;
    }
    set(&cluster, 0, &[("min_nodes", "1"), ("mode", "off")]);
    // Without a plan there is nothing to cancel.
    let refused = with_timeout("the controller is off", async {
        let client = try_connect(&cluster.url(0, "fulmar")).await.unwrap();
        client.batch_execute("ALTER SYSTEM CANCEL PLAN").await.unwrap_err()
    })
    .await;
    assert_eq!(refused.code().map(|code| code.code()), Some("55000"));
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_is_listed_and_unknown_is_removed_and_a_plan_is_cancelled() {
    let (program, flag) = Program::new();
    program.list(&["lost-1"]);
    program.behave("hang");
    let cluster = start(1, flag).await;
    set(&cluster, 0, QUICK);
    set(&cluster, 0, &[("start_timeout", "1h"), ("cool_down", "1h"), ("replace_after", "0")]);
    set(&cluster, 0, &[("min_nodes", "2"), ("mode", "on")]);
    wait_until("a plan", async || shown(&cluster, 0, "plan").await == "adding auto-1").await;
    control(&cluster, 0, &["cancel"]);
    wait_until("the plan is given up", async || shown(&cluster, 0, "plan").await.is_empty()).await;
    wait_until("its outcome", async || outcome(&cluster, 0, "add-nodes").is_some()).await;
    let given_up = outcome(&cluster, 0, "add-nodes").unwrap();
    assert_eq!(given_up["result"], "dropped", "{given_up}");
    assert!(given_up["text"].as_str().unwrap().contains("cancelled by an administrator"), "{given_up}");
    assert!(!program.calls().contains("remove lost-1"), "it may still start");
    let listings = program.count("list");
    // In this mode nothing is done.
    set(&cluster, 0, &[("mode", "advise"), ("start_timeout", "200ms")]);
    wait_until("rounds in the mode advise", async || program.count("list") > listings + 2).await;
    assert!(!program.calls().contains("remove lost-1"));
    set(&cluster, 0, &[("mode", "on")]);
    wait_until("the lost node is removed", async || program.calls().contains("remove lost-1")).await;
    wait_until("the event", async || {
        events(&cluster, "node.removed").await.iter().any(|event| event.contains("lost-1"))
    })
    .await;
}
