//! TPC-C at a small scale, against a Fulmar node and a PostgreSQL server.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

use fulmar_workload::client::Client;
use fulmar_workload::keys::Distribution;
use fulmar_workload::run::{Report, RunOptions, run};
use fulmar_workload::server::{Fulmar, Postgres, Product, Server};
use fulmar_workload::tenants;
use fulmar_workload::tpcc::Tpcc;
use fulmar_workload::workload::{Dialect, LoadContext, Workload};

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

async fn run_for(server: &Server, workload: Tpcc, seconds: f64) -> anyhow::Result<Report> {
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

const BAD_CREDIT_PAYMENTS: &str =
    "SELECT count(*) FROM customer WHERE c_credit = 'BC' AND c_payment_cnt > 1 AND c_data LIKE '% | %'";
const DELIVERED_ORDERS: &str = "SELECT count(*) FROM orders WHERE o_carrier_id IS NOT NULL AND o_id > 42";

/// Checks the effects of all kinds of transactions that the consistency conditions do not cover.
async fn check_effects(server: &Server) {
    let client = &mut client(server).await;
    let placed = number(client, "SELECT count(*) FROM orders").await - 1200;
    assert!(placed > 0, "new-order must insert orders");
    let assigned_ids = number(client, "SELECT sum(d_next_o_id - 61) FROM district").await;
    assert_eq!(placed, assigned_ids, "order ids must be assigned only to committed orders");
    let stock_orders = number(client, "SELECT sum(s_order_cnt) FROM stock").await;
    let lines = number(client, "SELECT count(*) FROM order_line WHERE ol_o_id > 60").await;
    assert_eq!(stock_orders, lines, "each order line must be counted in its stock");
    assert!(number(client, "SELECT min(s_quantity) FROM stock").await >= 10, "stock must be replenished");
    let paid = number(client, "SELECT sum(h_amount) FROM history").await;
    let received = number(client, "SELECT sum(w_ytd) FROM warehouse").await;
    assert_eq!(paid, received, "each payment must have a history row");
    assert_eq!(paid, number(client, "SELECT sum(c_ytd_payment) FROM customer").await);
    assert!(number(client, "SELECT count(*) FROM history").await > 1200);
    let balances = number(client, "SELECT sum(c_balance + c_ytd_payment) FROM customer").await;
    let delivered = "SELECT sum(ol_amount) FROM order_line WHERE ol_delivery_d IS NOT NULL";
    assert_eq!(balances, number(client, delivered).await, "balances must equal deliveries minus payments");
    let open = number(client, "SELECT count(*) FROM new_order").await;
    assert_eq!(open, number(client, "SELECT count(*) FROM orders WHERE o_carrier_id IS NULL").await);
    let deliveries = number(client, DELIVERED_ORDERS).await;
    assert_eq!(deliveries, number(client, "SELECT sum(c_delivery_cnt) FROM customer").await);
}

/// Runs the workload with statements and with procedures, and checks both.
async fn run_and_check(server: &Server) {
    for procedure in [false, true] {
        until_every_kind_has_committed(server, Tpcc { procedure, ..small() }).await;
        check_effects(server).await;
    }
}

/// Runs until every kind of transaction has committed, on a machine of any speed. One in ten
/// payments is by a customer with bad credit, and one in 25 transactions is a delivery.
async fn until_every_kind_has_committed(server: &Server, workload: Tpcc) {
    let mut transactions = 0;
    loop {
        let report = run_for(server, workload.clone(), 1.5).await.unwrap();
        assert_eq!(report.failed, 0, "{report}");
        transactions += report.transactions;
        let client = &mut client(server).await;
        let effects = [number(client, BAD_CREDIT_PAYMENTS).await, number(client, DELIVERED_ORDERS).await];
        if effects.iter().all(|count| *count > 0) && report.kinds.iter().all(|kind| kind.committed > 0) {
            return;
        }
        assert!(transactions < 2_000, "some kind of transaction never commits: {effects:?} {report}");
    }
}

#[tokio::test]
async fn fulmar_stays_consistent() {
    run_and_check(&fulmar().await).await;
}

#[tokio::test]
async fn postgres_stays_consistent() {
    run_and_check(&postgres().await).await;
}

async fn client(server: &Server) -> Client {
    Client::connect(&server.target().with_database(DATABASE)).await.unwrap()
}

/// Loads the data, and returns the number of rows that the workload reported.
async fn load(server: &Server, workload: &Tpcc) -> anyhow::Result<u64> {
    let mut client = client(server).await;
    let dialect = Dialect::of(&mut client).await?;
    let reported = Cell::new(0);
    let loaded = |rows| reported.set(reported.get() + rows);
    workload.load(&mut LoadContext { client: &mut client, dialect, seed: 3, loaded: &loaded }).await?;
    Ok(reported.get())
}

#[tokio::test]
async fn equal_seeds_load_equal_data() {
    let (fulmar, postgres) = (fulmar().await, postgres().await);
    // In one step into Fulmar, in two steps into PostgreSQL.
    assert_eq!(load(&fulmar, &small()).await.unwrap(), small().rows());
    for warehouses in [1, 2] {
        let part = Tpcc { warehouses, ..small() };
        assert_eq!(load(&postgres, &part).await.unwrap(), part.rows());
    }
    let (mut at_fulmar, mut at_postgres) = (client(&fulmar).await, client(&postgres).await);
    for (table, order) in [
        ("item", "i_id"),
        ("warehouse", "w_id"),
        ("district", "d_w_id, d_id"),
        ("customer", "c_w_id, c_d_id, c_id"),
        ("history", "h_w_id, h_d_id, h_c_id"),
        ("new_order", "no_w_id, no_d_id, no_o_id"),
        ("orders", "o_w_id, o_d_id, o_id"),
        ("order_line", "ol_w_id, ol_d_id, ol_o_id, ol_number"),
        ("stock", "s_w_id, s_i_id"),
    ] {
        // Some tables have additional columns in Fulmar.
        let columns = format!(
            "SELECT string_agg(column_name, ', ' ORDER BY ordinal_position) \
             FROM information_schema.columns WHERE table_schema = 'public' AND table_name = '{table}'"
        );
        let columns = at_postgres.query(&columns).await.unwrap();
        let columns = columns[0][0].as_deref().unwrap();
        let sql = format!("SELECT {columns} FROM {table} ORDER BY {order}");
        let rows = at_fulmar.query(&sql).await.unwrap();
        assert!(!rows.is_empty() && rows == at_postgres.query(&sql).await.unwrap(), "{table}");
    }
    let error = load(&fulmar, &Tpcc { customers: 50, ..small() }).await.unwrap_err();
    assert!(error.to_string().contains("--customers 60"), "{error}");
}

#[tokio::test]
async fn violated_consistency_conditions_fail_the_run() {
    let server = fulmar().await;
    load(&server, &small()).await.unwrap();
    let mut client = client(&server).await;
    for (condition, wrong, right) in [
        (
            "condition 1",
            "UPDATE warehouse SET w_ytd = w_ytd + 1 WHERE w_id = 2",
            "UPDATE warehouse SET w_ytd = w_ytd - 1 WHERE w_id = 2",
        ),
        (
            "condition 2",
            "UPDATE district SET d_next_o_id = d_next_o_id + 1 WHERE d_w_id = 1 AND d_id = 3",
            "UPDATE district SET d_next_o_id = d_next_o_id - 1 WHERE d_w_id = 1 AND d_id = 3",
        ),
        (
            "condition 3",
            "DELETE FROM new_order WHERE no_w_id = 2 AND no_d_id = 10 AND no_o_id = 50",
            "INSERT INTO new_order (no_w_id, no_d_id, no_o_id) VALUES (2, 10, 50)",
        ),
        (
            "condition 4",
            "UPDATE orders SET o_ol_cnt = o_ol_cnt + 1 WHERE o_w_id = 1 AND o_d_id = 1 AND o_id = 1",
            "UPDATE orders SET o_ol_cnt = o_ol_cnt - 1 WHERE o_w_id = 1 AND o_d_id = 1 AND o_id = 1",
        ),
    ] {
        small().check(&mut client).await.unwrap();
        client.query(wrong).await.unwrap();
        let error = small().check(&mut client).await.unwrap_err().to_string();
        assert!(error.contains(condition), "{error}");
        if condition == "condition 1" {
            let error = run_for(&server, small(), 0.1).await.unwrap_err();
            assert!(format!("{error:#}").contains(condition), "{error:#}");
        }
        client.query(right).await.unwrap();
    }
}

#[tokio::test]
async fn skewed_load_and_pauses_are_supported() {
    let server = fulmar().await;
    let hot = Tpcc {
        distribution: "high-skew:60:1".parse().unwrap(),
        one_warehouse: true,
        procedure: true,
        ..small()
    };
    assert!(run_for(&server, hot, 0.3).await.unwrap().transactions > 0);
    let slow = Tpcc { distribution: Distribution::LowSkew, pauses: 0.001, ..small() };
    let report = run_for(&server, slow, 1.0).await.unwrap();
    // The pauses of a terminal's cycle add up to 23 ms on average, in addition to its transactions.
    assert!((1..=6 * 60).contains(&report.transactions), "{report}");
}
