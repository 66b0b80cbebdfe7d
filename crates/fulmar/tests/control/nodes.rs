//! Nodes that are added and removed by the provisioner `processes`.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn cluster_grows_and_shrinks_with_its_load_without_a_failed_transaction() {
    let (provisioned, flag) = Provisioned::new("grow", 19_400);
    let cluster = start(1, flag).await;
    let names = ["a", "b", "c", "d"];
    create(&cluster, &names).await;
    let (stop_load, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    // This client stays from begin to end.
    let writer = write(cluster.url(0, "a"), Duration::from_millis(200), stop.clone());
    set(&cluster, 0, QUICK);
    set(&cluster, 0, &[("max_nodes", "2")]);
    set(&cluster, 0, &[("cool_down", "2s"), ("mode", "on")]);
    let clients: Vec<_> = names.iter().map(|name| burn(cluster.url(0, name), stop_load.clone())).collect();

    wait_for_nodes(&cluster, 0, &["auto-1 alive", "n1 alive"]).await;
    wait_until("databases at the new node", async || {
        owners(&cluster, 0).await.iter().any(|owner| owner == "auto-1")
    })
    .await;
    wait_until("the outcome", async || {
        outcome(&cluster, 0, "add-nodes").is_some_and(|outcome| outcome["result"] == "done")
    })
    .await;
    // The forecast of the default policy may expect the load to return.
    set(&cluster, 0, &[("policy", "thresholds")]);
    stop_load.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }

    wait_for_nodes(&cluster, 0, &["n1 alive"]).await;
    assert_eq!(owners(&cluster, 0).await, ["n1"; 4]);
    wait_until("the outcome", async || {
        outcome(&cluster, 0, "drain").is_some_and(|outcome| outcome["result"] == "done")
    })
    .await;
    assert_eq!(shown(&cluster, 0, "plan").await, "");
    assert_eq!(provisioned.processes(), [0_i32; 0], "the process has ended");
    stop.store(true, Ordering::Relaxed);
    let written = with_timeout("the writer", writer).await.unwrap();
    let count = "SELECT CAST(count(*) AS TEXT) FROM t";
    let client = try_connect(&cluster.url(0, "a")).await.unwrap();
    let rows: String = with_timeout(count, client.query_one(count, &[])).await.unwrap().get(0);
    assert_eq!(rows, written.to_string());
    for kind in ["node.added", "node.removed"] {
        assert_eq!(events(&cluster, kind).await, [r#"{"node":"auto-1"}"#], "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn next_controller_finishes_the_plan_of_one_that_was_killed() {
    let (provisioned, flag) = Provisioned::new("kill", 19_430);
    let mut cluster = start(3, flag).await;
    create(&cluster, &["a", "b"]).await;
    set(&cluster, 0, QUICK);
    set(&cluster, 0, &[("hold_down", "1h"), ("min_nodes", "4"), ("mode", "on")]);
    wait_until("a plan", async || shown(&cluster, 0, "plan").await == "adding auto-1").await;
    // The node that is killed is not to be replaced.
    execute(&cluster, 0, "fulmar", "ALTER SYSTEM SET control.min_nodes = 1").await;
    let controller = shown(&cluster, 0, "controller").await;
    let killed = (0..3).find(|node| cluster.name(*node) == controller).unwrap();
    cluster.kill(killed).unwrap();
    let other = (killed + 1) % 3;
    wait_until("another controller", async || {
        let next = shown(&cluster, other, "controller").await;
        next != controller && !next.is_empty()
    })
    .await;
    wait_until("the plan is finished", async || {
        let states = node_states(&cluster, other).await;
        states.contains(&"auto-1 alive".to_owned()) && shown(&cluster, other, "plan").await.is_empty()
    })
    .await;
    assert_eq!(provisioned.processes().len(), 1, "the node was added once");
    let added = decisions(&cluster, other).into_iter().filter(|decision| decision["action"] == "add-nodes");
    assert_eq!(added.count(), 1);
    wait_until("its outcome", async || outcome(&cluster, other, "add-nodes").is_some()).await;
    assert_eq!(outcome(&cluster, other, "add-nodes").unwrap()["result"], "done");
    // Every database has an owner that serves it.
    for database in ["a", "b"] {
        execute(&cluster, other, database, "INSERT INTO t VALUES (1)").await;
    }
    set(&cluster, other, &[("max_nodes", "2")]);
    wait_until("the node is removed", async || {
        let states = node_states(&cluster, other).await;
        !states.iter().any(|state| state.starts_with("auto-1"))
    })
    .await;
    assert_eq!(provisioned.processes(), [0_i32; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_node_is_replaced_once_and_one_that_dies_young_is_a_failure() {
    let (provisioned, flag) = Provisioned::new("dead", 19_520);
    let mut cluster = start(2, flag).await;
    create(&cluster, &["a", "b"]).await;
    set(&cluster, 0, QUICK);
    set(&cluster, 0, &[("hold_up", "1h"), ("hold_down", "1h"), ("min_nodes", "2"), ("mode", "on")]);
    let controller = elected(&cluster).await;
    let killed = (0..2).find(|node| cluster.name(*node) != controller).unwrap();
    let other = 1 - killed;
    cluster.kill(killed).unwrap();
    let state = format!("{} sealed", cluster.name(killed));
    wait_until("the failover", async || node_states(&cluster, other).await.contains(&state)).await;
    assert!(!decisions(&cluster, other).iter().any(|decision| decision["action"] == "add-nodes"));
    set(&cluster, other, &[("replace_after", "0")]);
    wait_until("the outcome", async || outcome(&cluster, other, "add-nodes").is_some()).await;
    assert_eq!(outcome(&cluster, other, "add-nodes").unwrap()["result"], "done");
    // The results of the decisions to add nodes, newest first.
    let additions = || -> Vec<Value> {
        let all = decisions(&cluster, other).into_iter().filter(|one| one["action"] == "add-nodes");
        all.map(|one| one["outcome"]["result"].clone()).collect()
    };
    assert_eq!(additions(), ["done"], "the minimum is no second reason");
    for database in ["a", "b"] {
        execute(&cluster, other, database, "INSERT INTO t VALUES (1)").await;
    }

    // The new node dies before it has served for `start_timeout`.
    provisioned.kill();
    wait_until("an event", async || {
        let failures = events(&cluster, "provisioner.failed").await;
        failures.iter().any(|details| details.contains("after it began to serve"))
    })
    .await;
    wait_until("a decision that is put off", async || additions().len() > 1).await;
    let results = additions();
    let (first, later) = results.split_last().unwrap();
    assert_eq!(first, "done");
    assert!(later.iter().all(|result| result == "advised"), "no node is added for a while: {results:?}");
}
