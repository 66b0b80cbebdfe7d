//! Hot keys: an overloaded node makes the controller count accesses per key, and its decision names
//! them.

use super::*;

/// Reads mostly one key until it is stopped.
fn read(url: String, stop: Arc<AtomicBool>) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        let client = try_connect(&url).await.unwrap();
        let read = client.prepare("SELECT v FROM t WHERE v = $1").await.unwrap();
        let mut number = 0_i64;
        while !stop.load(Ordering::Relaxed) {
            let key = if number % 10 == 0 { number % 1000 } else { 777 };
            let values: [&(dyn tokio_postgres::types::ToSql + Sync); 1] = [&key];
            let query = client.query(&read, &values);
            with_timeout("a read", query).await.unwrap_or_else(|error| panic!("a read failed: {error:?}"));
            number += 1;
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn decision_names_the_hot_keys_of_an_overloaded_node() {
    // Nodes do not count by themselves: they never reach the watermark of four CPUs.
    let flags = ["--cpus", "4", "--key-watermark", "1", "--key-window", "1"].map(str::to_owned);
    let setup = ClusterSetup { nodes: 2, arguments: flags.to_vec(), ..ClusterSetup::default() };
    let cluster = Cluster::start(Path::new(env!("CARGO_BIN_EXE_fulmar")), setup).await.unwrap();
    create(&cluster, &["shop"]).await;
    execute(&cluster, 0, "fulmar", "ALTER DATABASE shop MOVE TO 'n1'").await;
    let keys = "SELECT table_name || ' ' || key FROM fulmar.hot_keys WHERE tenant = 'shop' AND share > 0.5";
    let stop = Arc::new(AtomicBool::new(false));
    let client = read(cluster.url(0, "shop"), stop.clone());
    assert!(query(&cluster, 0, keys).await.is_empty(), "there is no controller yet");
    set(&cluster, 0, QUICK);
    set(&cluster, 0, &[("low", "0.01"), ("target", "0.02"), ("high", "0.03"), ("mode", "on")]);
    let decision = || {
        let all = decisions(&cluster, 0);
        let is_hot = |one: &Value| one["why"].to_string().contains("hot keys of shop: t 777 (");
        all.into_iter().find(|one| is_hot(one) && one["action"] == "tenant")
    };
    wait_until("a decision with the hot keys", async || decision().is_some()).await;
    let decision = decision().unwrap();
    assert_eq!(decision["what"], "nothing that can be done helps shop", "{decision}");
    let why = decision["why"].to_string();
    assert!(why.contains("there is no mechanism to move single keys (row-group)"), "{why}");
    assert_eq!(decision["outcome"]["text"], "not carried out: single keys cannot be moved", "{decision}");
    wait_until("the key in the view", async || query(&cluster, 1, keys).await == ["t 777"]).await;
    assert_eq!(owners(&cluster, 0).await, ["n1"], "the only tenant stays: another node is no better");
    stop.store(true, Ordering::Relaxed);
    client.await.unwrap();
}
