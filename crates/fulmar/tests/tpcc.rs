//! TPC-C at a small scale, against a real node and a real PostgreSQL.

use std::path::PathBuf;
use std::time::Duration;

use fulmar_workload::client::Client;
use fulmar_workload::run::{Report, RunOptions, run};
use fulmar_workload::server::{Fulmar, Postgres, Product, Server};
use fulmar_workload::tenants;
use fulmar_workload::tpcc::Tpcc;

const DATABASE: &str = "tpcc";

async fn start(product: Box<dyn Product>) -> Server {
    let server = Server::start(product, 256 << 20, 20).await.unwrap();
    tenants::create(&server.target(), &[DATABASE.to_owned()], |_| ()).await.unwrap();
    server
}

async fn fulmar() -> Server {
    start(Box::new(Fulmar::at(PathBuf::from(env!("CARGO_BIN_EXE_fulmar"))))).await
}

async fn postgres() -> Server {
    start(Box::new(Postgres::installed().unwrap())).await
}

fn small() -> Tpcc {
    Tpcc { warehouses: 2, items: 200, customers: 60, ..Tpcc::default() }
}

async fn go(server: &Server, workload: Tpcc, seconds: f64) -> anyhow::Result<Report> {
    let options = RunOptions {
        connections: 6,
        warm_up: Duration::from_millis(100),
        measure: Duration::from_secs_f64(seconds),
        ..RunOptions::new(server.target().with_database(DATABASE))
    };
    run(workload, options).await
}

async fn number(client: &mut Client, sql: &str) -> i64 {
    let rows = client.query(sql).await.unwrap();
    rows[0][0].as_ref().unwrap().parse().unwrap()
}

/// All that a run must leave beside what the consistency conditions say.
async fn traces_of_every_kind(server: &Server) {
    let client = &mut Client::connect(&server.target().with_database(DATABASE)).await.unwrap();
    let placed = number(client, "SELECT count(*) FROM orders").await - 1200;
    assert!(placed > 0, "new-order places orders");
    let with_number = number(client, "SELECT sum(d_next_o_id - 61) FROM district").await;
    assert_eq!(placed, with_number, "numbers are given to placed orders only");
    let taken = number(client, "SELECT sum(s_order_cnt) FROM stock").await;
    let lines = number(client, "SELECT count(*) FROM order_line WHERE ol_o_id > 60").await;
    assert_eq!(taken, lines, "each line has taken from a stock");
    let least = number(client, "SELECT min(s_quantity) FROM stock").await;
    assert!(least >= 10 - 10, "stock is filled up: {least}");
    let paid = number(client, "SELECT sum(h_amount) FROM history").await;
    assert_eq!(paid, number(client, "SELECT sum(w_ytd) FROM warehouse").await, "payments have a history");
    assert_eq!(paid, number(client, "SELECT sum(c_ytd_payment) FROM customer").await);
    assert!(number(client, "SELECT count(*) FROM history").await > 1200);
    let noted =
        "SELECT count(*) FROM customer WHERE c_credit = 'BC' AND c_payment_cnt > 1 AND c_data LIKE '% | %'";
    assert!(number(client, noted).await > 0, "bad credit is noted");
    let balances = number(client, "SELECT sum(c_balance + c_ytd_payment) FROM customer").await;
    let delivered = "SELECT sum(ol_amount) FROM order_line WHERE ol_delivery_d IS NOT NULL";
    assert_eq!(balances, number(client, delivered).await, "balances are deliveries less payments");
    let open = number(client, "SELECT count(*) FROM new_order").await;
    assert_eq!(open, number(client, "SELECT count(*) FROM orders WHERE o_carrier_id IS NULL").await);
    let out =
        number(client, "SELECT count(*) FROM orders WHERE o_carrier_id IS NOT NULL AND o_id > 42").await;
    assert!(out > 0, "deliveries take orders out");
    assert_eq!(out, number(client, "SELECT sum(c_delivery_cnt) FROM customer").await);
}

async fn both_ways(server: &Server) {
    for procedures in [false, true] {
        let report = go(server, Tpcc { procedures, ..small() }, 1.5).await.unwrap();
        assert!(report.transactions > 50 && report.failed == 0, "{report}");
        traces_of_every_kind(server).await;
    }
}

#[tokio::test]
async fn a_node_keeps_the_books() {
    both_ways(&fulmar().await).await;
}

#[tokio::test]
async fn postgres_keeps_the_books() {
    both_ways(&postgres().await).await;
}
