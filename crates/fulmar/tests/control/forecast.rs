//! The forecasts of the controller, at every node and after a change of controller.

use std::io::{Read, Write};
use std::net::TcpStream;

use super::*;

/// The number of steps of a series with a known load, up to a time.
async fn steps(cluster: &Cluster, through: usize, series: &str, until: &str) -> usize {
    let sql = format!(
        "SELECT CAST(count(*) AS TEXT) FROM fulmar.forecast \
         WHERE series = '{series}' AND load IS NOT NULL AND CAST(at AS TEXT) <= '{until}'"
    );
    query(cluster, through, &sql).await[0].parse().unwrap()
}

/// What `fulmar forecast` prints.
fn forecast(cluster: &Cluster, node: usize, arguments: &[&str]) -> String {
    let server = cluster.url(node, "fulmar");
    stdout(&run(&[&["forecast"], arguments, &["--server", &server]].concat()))
}

/// The metrics of a node.
fn metrics(cluster: &Cluster, node: usize) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", cluster.http_port(node))).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn forecast_keeps_its_history_after_a_change_of_controller() {
    let mut cluster = start(3, vec!["--public-metrics".to_owned()]).await;
    create(&cluster, &["a"]).await;
    set(&cluster, 0, QUICK);
    set(&cluster, 0, &[("mode", "advise")]);
    let stop = Arc::new(AtomicBool::new(false));
    let client = burn(cluster.url(0, "a"), stop.clone());
    let end = "9999";
    for node in 0..3 {
        wait_until("a history at every node", async || {
            steps(&cluster, node, "cluster", end).await >= 40
                && steps(&cluster, node, "tenant", end).await >= 8
        })
        .await;
    }
    stop.store(true, Ordering::Relaxed);
    client.await.unwrap();
    let newest = "SELECT CAST(max(at) AS TEXT) FROM fulmar.forecast WHERE load IS NOT NULL";
    let newest = query(&cluster, 0, newest).await.remove(0);

    let controller = shown(&cluster, 0, "controller").await;
    let killed = (0..3).find(|node| cluster.name(*node) == controller).unwrap();
    let metric = "fulmar_forecast_error_ratio{method=\"last-value\"} ";
    assert!(metrics(&cluster, killed).contains(metric), "{}", metrics(&cluster, killed));
    let other = (killed + 1) % 3;
    assert!(!metrics(&cluster, other).contains(metric), "only the controller has errors");
    cluster.kill(killed).unwrap();
    // A new series would have no step before the change.
    wait_until("the history at another controller", async || {
        let next = shown(&cluster, other, "controller").await;
        next != controller && steps(&cluster, other, "cluster", &newest).await >= 30
    })
    .await;
    assert!(steps(&cluster, other, "tenant", &newest).await >= 3);
    assert!(steps(&cluster, other, "node", &newest).await >= 3);

    let json: Value = serde_json::from_str(&forecast(&cluster, other, &["a", "--json"])).unwrap();
    let points = json["points"].as_array().unwrap();
    let known = points.iter().filter(|point| point["load"].as_f64().is_some_and(|load| load > 0.0));
    assert!(known.count() >= 3, "{json}");
    let is_ahead = |point: &&Value| point["load"].is_null() && point["forecast"].is_number();
    assert!(points.iter().any(|point| is_ahead(&point)), "{json}");
    assert_eq!(json["methods"].as_array().unwrap().len(), 5, "{json}");
    let directory = tempfile::tempdir().unwrap();
    let svg = directory.path().join("cluster.svg");
    let text = forecast(&cluster, other, &["--cluster", "--svg", svg.to_str().unwrap()]);
    assert!(text.starts_with("cluster: ") && text.contains("forecast  "), "{text}");
    assert!(text.contains("holt-winters") && text.contains("last-value"), "{text}");
    assert!(std::fs::read_to_string(svg).unwrap().contains("forecast"));
    let node = cluster.name(other).to_owned();
    assert!(forecast(&cluster, other, &["--node", &node]).starts_with(&node));
    let server = cluster.url(other, "fulmar");
    let error = stderr_of_failure(&run(&["forecast", "none", "--server", &server]), 1);
    assert!(error.contains("there is no forecast of tenant \"none\""), "{error}");
}
