//! A node whose store is many times slower than that of the others is replaced: it does not count
//! for the minimum of nodes.

use std::process::{Child, Command, Stdio};

use fulmar_workload::server::ClusterStore;

use super::provisioners::Program;
use super::*;
use crate::common::gate::{Gate, State};

/// Delay of the responses of one node's store: far above the minimum, and the latency of the others.
const DELAY: Duration = Duration::from_millis(700);

/// A node that the test starts for the provisioner.
struct Added(Child);

impl Added {
    /// Starts one of the cluster's nodes under another name.
    fn start(cluster: &Cluster, number: usize, name: &str) -> Added {
        let template = cluster.command(number);
        let mut command = Command::new(template.get_program());
        for argument in template.get_args() {
            command.arg(if argument == cluster.name(number) { name.as_ref() } else { argument });
        }
        command.envs(template.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let log = std::fs::File::create(cluster.log(number)).unwrap();
        Added(command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap())
    }
}

impl Drop for Added {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_node_is_replaced_by_another_one() {
    let (program, arguments) = Program::new();
    program.list(&["n3"]);
    program.behave("work");
    let setup = ClusterSetup { nodes: 4, store: ClusterStore::S3, arguments, ..ClusterSetup::default() };
    let mut cluster = Cluster::prepare(Path::new(env!("CARGO_BIN_EXE_fulmar")), setup).unwrap();
    let gate = Gate::start_for_node(&mut cluster, 2).await;
    for node in 0..3 {
        cluster.start_node(node).await.unwrap();
    }
    cluster.wait_until_alive(3).await.unwrap();
    create(&cluster, &["shop"]).await;
    stdout(&run(&["move", "shop", "--to", "n3", "--server", &cluster.url(0, "fulmar")]));
    set(&cluster, 0, QUICK);
    set(&cluster, 0, &[("policy", "thresholds"), ("hold_up", "1h"), ("hold_down", "1h")]);
    set(&cluster, 0, &[("replace_after", "1s"), ("start_timeout", "1h"), ("min_nodes", "3")]);
    set(&cluster, 0, &[("mode", "on")]);
    elected(&cluster).await;
    assert_eq!(owners(&cluster, 0).await, ["n3"]);
    execute(&cluster, 0, "shop", "INSERT INTO t VALUES (1)").await;

    gate.state.send_replace(State::Open(DELAY));
    wait_until("another node is added", async || program.count("add auto-1") > 0).await;
    let is_drain = |decision: &&Value| decision["action"] == "drain";
    assert_eq!(
        decisions(&cluster, 0).iter().filter(is_drain).count(),
        0,
        "drained before another one serves"
    );
    let _added = Added::start(&cluster, 3, "auto-1");
    program.list(&["n3", "auto-1"]);
    wait_until("the slow node is removed", async || program.count("remove n3") > 0).await;
    wait_until("the removed node is empty", async || owners(&cluster, 0).await != ["n3"]).await;
    cluster.kill(2).unwrap();
    wait_for_nodes(&cluster, 0, &["auto-1 alive", "n1 alive", "n2 alive"]).await;
    execute(&cluster, 0, "shop", "INSERT INTO t VALUES (2)").await;
    wait_until("the outcome", async || outcome(&cluster, 0, "drain").is_some()).await;
    let all = decisions(&cluster, 0);
    let drain = all.iter().find(is_drain).unwrap();
    assert_eq!(drain["outcome"]["result"], "done", "{drain}");
    assert!(drain["why"].to_string().contains("much slower"), "{drain}");
    assert_eq!(all.iter().filter(is_drain).count(), 1, "{all:?}");
}
