//! Controllers that are killed in the middle of plans, ten times in succession: plans that add a node
//! and plans that remove one take turns.

use super::*;

const ROUNDS: u32 = 10;
const DATABASES: [&str; 3] = ["a", "b", "c"];

#[tokio::test(flavor = "multi_thread")]
async fn no_plan_of_ten_killed_controllers_is_left_half_done() {
    let (provisioned, flag) = Provisioned::new("kills", 19_460);
    let mut cluster = start(3, flag).await;
    create(&cluster, &DATABASES).await;
    set(&cluster, 0, QUICK);
    // An added node may control, too. What a killed one leaves is removed after this time.
    set(&cluster, 0, &[("start_timeout", "5s"), ("hold_down", "1h"), ("mode", "on")]);
    let mut inserted = 0;
    for round in 0..ROUNDS {
        let added = added(&cluster, 0).await;
        let limit = match added.first() {
            None => ("min_nodes", "4", "1"),
            Some(node) => {
                // The node has something to hand over.
                let sql = format!("ALTER DATABASE a MOVE TO '{node}'");
                execute(&cluster, 0, "fulmar", &sql).await;
                ("max_nodes", "3", "16")
            }
        };
        let other = kill_controller_in_plan(&mut cluster, &provisioned, limit).await;
        wait_until("the plan has ended", async || shown(&cluster, other, "plan").await.is_empty()).await;
        for database in DATABASES {
            execute(&cluster, other, database, "INSERT INTO t SELECT coalesce(max(v), 0) + 1 FROM t").await;
        }
        inserted += 1;
        for node in 0..3 {
            if !cluster.is_running(node) {
                cluster.start_node(node).await.unwrap();
            }
        }
        wait_until("no node is left half-added", async || {
            let states = node_states(&cluster, other).await;
            let added = states.len() - 3;
            let is_complete = states.iter().all(|state| state.ends_with(" alive"));
            is_complete && added <= 1 && provisioned.processes().len() == added
        })
        .await;
        eprintln!("round {round}: {:?}", node_states(&cluster, other).await);
    }
    for database in DATABASES {
        let count = "SELECT CAST(count(*) AS TEXT) FROM t";
        let client = try_connect(&cluster.url(0, database)).await.unwrap();
        let rows: String = with_timeout(count, client.query_one(count, &[])).await.unwrap().get(0);
        assert_eq!(rows, inserted.to_string(), "{database}");
    }
    set(&cluster, 0, &[("max_nodes", "3")]);
    wait_for_nodes(&cluster, 0, &["n1 alive", "n2 alive", "n3 alive"]).await;
    wait_until("the process has ended", async || provisioned.processes().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn suspended_controller_does_nothing_more_when_it_continues() {
    let (provisioned, flag) = Provisioned::new("suspended", 19_550);
    let cluster = start(3, flag).await;
    set(&cluster, 0, QUICK);
    set(&cluster, 0, &[("hold_up", "1h"), ("hold_down", "1h"), ("mode", "on")]);
    let controller = elected(&cluster).await;
    let suspended = (0..3).find(|node| cluster.name(*node) == controller).unwrap();
    let other = (suspended + 1) % 3;
    set(&cluster, other, &[("min_nodes", "4")]);
    wait_until("a plan", async || !shown(&cluster, other, "plan").await.is_empty()).await;
    cluster.signal(suspended, Signal::STOP).unwrap();
    wait_until("another controller", async || {
        let next = shown(&cluster, other, "controller").await;
        next != controller && !next.is_empty()
    })
    .await;
    wait_until("the plan has ended", async || shown(&cluster, other, "plan").await.is_empty()).await;
    let decided = decisions(&cluster, other).len();

    // It still believes that it is the controller, until it finds that it was declared dead.
    cluster.signal(suspended, Signal::CONT).unwrap();
    let states = ["auto-1 alive", "n1 alive", "n2 alive", "n3 alive"];
    wait_for_nodes(&cluster, other, &states).await;
    wait_until("it accepts clients", async || try_connect(&cluster.url(suspended, "fulmar")).await.is_ok())
        .await;
    wait_until("it knows its successor", async || {
        shown(&cluster, suspended, "controller").await != controller
    })
    .await;
    let by_it = |one: &&Value| one["controller"] == controller;
    let decisions = decisions(&cluster, suspended);
    let later = decisions.iter().take(decisions.len().saturating_sub(decided));
    assert_eq!(later.filter(by_it).count(), 0, "{decisions:?}");
    let additions = decisions.iter().filter(|one| one["action"] == "add-nodes");
    assert_eq!(additions.count(), 1, "{decisions:?}");
    assert_eq!(provisioned.processes().len(), 1);
}

/// Nodes that the provisioner has added.
async fn added(cluster: &Cluster, through: usize) -> Vec<String> {
    let sql = "SELECT name FROM fulmar.nodes WHERE name LIKE 'auto-%'";
    query(cluster, through, sql).await
}

/// Sets a limit that makes the controller plan, and resets it, so that the killed node is not
/// replaced. Kills the controller as soon as there is a plan. Returns another node, when that one sees
/// the next controller.
async fn kill_controller_in_plan(
    cluster: &mut Cluster,
    provisioned: &Provisioned,
    limit: (&str, &str, &str),
) -> usize {
    let (setting, value, reset) = limit;
    set(cluster, 0, &[(setting, value)]);
    wait_until("a plan", async || !shown(cluster, 0, "plan").await.is_empty()).await;
    execute(cluster, 0, "fulmar", &format!("ALTER SYSTEM SET control.{setting} = {reset}")).await;
    let controller = shown(cluster, 0, "controller").await;
    let other = match (0..3).find(|node| cluster.name(*node) == controller) {
        Some(killed) => {
            cluster.kill(killed).unwrap();
            (killed + 1) % 3
        }
        None => {
            provisioned.kill();
            0
        }
    };
    wait_until("another controller", async || {
        let next = shown(cluster, other, "controller").await;
        next != controller && !next.is_empty()
    })
    .await;
    other
}
