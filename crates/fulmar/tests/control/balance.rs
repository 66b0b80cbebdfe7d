//! Balance among fixed nodes, advice, and what an operator allows.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn databases_of_a_busy_node_are_moved_once_and_pinned_ones_stay() {
    let cluster = start(2, Vec::new()).await;
    let names = ["a", "b", "c"];
    create(&cluster, &names).await;
    for name in names {
        execute(&cluster, 0, "fulmar", &format!("ALTER DATABASE {name} MOVE TO 'n1'")).await;
    }
    let stop = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = names.iter().map(|name| burn(cluster.url(0, name), stop.clone())).collect();
    let write_to = |name| write(cluster.url(1, name), Duration::from_millis(1), stop.clone());
    let writers = ["b", "c"].map(write_to);
    set(&cluster, 0, QUICK);
    // The moves before this test are within it.
    set(&cluster, 0, &[("cool_down", "1s"), ("mode", "advise")]);
    control(&cluster, 1, &["pin", "a"]);
    assert_eq!(shown(&cluster, 0, "pinned").await, "a");

    wait_until("advice", async || outcome(&cluster, 0, "move").is_some()).await;
    let advised = outcome(&cluster, 0, "move").unwrap();
    assert_eq!(
        (&advised["result"], &advised["text"]),
        (&"advised".into(), &"not carried out: the mode is advise".into())
    );
    assert_eq!(owners(&cluster, 0).await, ["n1", "n1", "n1"], "advice moves nothing");

    set(&cluster, 0, &[("mode", "on")]);
    let moved = async || owners(&cluster, 0).await.iter().filter(|owner| *owner == "n2").count();
    wait_until("a move", async || moved().await > 0).await;
    // Otherwise a next decision could follow at any time.
    set(&cluster, 0, &[("cool_down", "1h")]);
    wait_until("its outcome", async || {
        outcome(&cluster, 1, "move").is_some_and(|outcome| outcome["result"] == "done")
    })
    .await;
    let newest = decisions(&cluster, 0).into_iter().find(|decision| decision["action"] == "move").unwrap();
    assert!(newest["why"][0].as_str().unwrap().contains("utilisation"), "{newest}");
    assert!(newest["predicted"].as_str().unwrap().contains("highest"), "{newest}");
    assert!(newest["outcome"]["highest"].as_f64().is_some(), "{newest}");
    assert_eq!(owners(&cluster, 0).await[0], "n1", "a pinned database stays");
    let why = stdout(&run(&["decisions", "--why", "--server", &cluster.url(1, "fulmar")]));
    assert!(why.contains("why") && why.contains("predicted"), "{why}");

    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }
    for writer in writers {
        assert!(writer.await.unwrap() > 0, "transactions continue while their database is moved");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_are_checked_and_only_for_superusers() {
    let cluster =
        start(1, vec!["--site".to_owned(), "eu".to_owned(), "--rack".to_owned(), "r7".to_owned()]).await;
    let client = try_connect(&cluster.url(0, "fulmar")).await.unwrap();
    for (sql, state, expected) in [
        ("ALTER SYSTEM SET control.mode = 'maybe'", "22023", "invalid value for parameter \"control.mode\""),
        ("ALTER SYSTEM SET control.colour = 'red'", "42704", "unrecognized configuration parameter"),
        ("ALTER SYSTEM SET work_mem = '4MB'", "42704", "unrecognized configuration parameter \"work_mem\""),
        ("ALTER SYSTEM SET control.low = '0.9'", "22023", "invalid value"),
        ("ALTER NODE n9 FORBID", "22023", "node \"n9\" does not exist"),
        ("ALTER DATABASE nothing PIN", "3D000", "does not exist"),
    ] {
        let error = with_timeout(sql, client.batch_execute(sql)).await.unwrap_err();
        let error = error.as_db_error().unwrap();
        assert_eq!(error.code().code(), state, "{sql}: {error:?}");
        assert!(error.message().contains(expected), "{sql}: {error:?}");
    }
    control(&cluster, 0, &["set", "high", "80%"]);
    assert_eq!(shown(&cluster, 0, "high").await, "0.8");
    control(&cluster, 0, &["reset", "high"]);
    assert_eq!(shown(&cluster, 0, "high").await, "0.77");
    control(&cluster, 0, &["forbid", "n1"]);
    assert_eq!(shown(&cluster, 0, "forbidden").await, "n1");
    control(&cluster, 0, &["allow", "n1"]);
    assert_eq!(shown(&cluster, 0, "forbidden").await, "");
    let list = control(&cluster, 0, &["show"]);
    assert!(list.contains("cool_down") && list.contains("10min"), "{list}");
    let place = "SELECT site || '/' || rack FROM fulmar.nodes";
    assert_eq!(query(&cluster, 0, place).await, ["eu/r7"]);
    execute(&cluster, 0, "fulmar", "CREATE DATABASE shop").await;
    execute(&cluster, 0, "fulmar", "ALTER DATABASE shop SET latency_objective = '20 ms'").await;
    let objective = "SELECT value FROM fulmar.limits WHERE tenant = 'shop' AND name = 'latency_objective'";
    assert_eq!(query(&cluster, 0, objective).await, ["20ms"]);
    let changed = events(&cluster, "control.changed").await;
    assert!(changed[0].contains("\"setting\":\"control.high\""), "{changed:?}");
}
