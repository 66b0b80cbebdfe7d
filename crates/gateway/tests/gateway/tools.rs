//! Runs PostgreSQL's own programs against a node.

use crate::common::Node;

fn text(output: &std::process::Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    assert!(!err.contains("ERROR"), "{err}");
    out.into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn pgbench_initializes_and_runs_its_scripts() {
    let node = Node::insecure().await;
    let client = node.database("bench").await;
    let output = node.run("pgbench", "bench", &["-i"]).await;
    text(&output);
    let count = client.query_one("SELECT count(*) FROM pgbench_accounts", &[]).await.unwrap();
    assert_eq!(count.get::<_, i64>(0), 100_000);
    for script in ["tpcb-like", "simple-update", "select-only"] {
        for mode in ["simple", "extended", "prepared"] {
            let arguments = ["-b", script, "-M", mode, "-c", "2", "-t", "10"];
            let ran = text(&node.run("pgbench", "bench", &arguments).await);
            assert!(ran.contains("number of transactions actually processed: 20/20"), "{ran}");
        }
    }
    // Every transaction adds the same amount to an account, a teller and a branch, except those of
    // simple-update, which only changes the accounts.
    let sums =
        "SELECT (SELECT sum(tbalance) FROM pgbench_tellers), (SELECT sum(bbalance) FROM pgbench_branches)";
    let sums = client.simple_query(sums).await.unwrap();
    let tokio_postgres::SimpleQueryMessage::Row(row) = &sums[1] else { panic!("{sums:?}") };
    assert_eq!(row.get(0), row.get(1));
    // Initializes again over the existing tables, with keys to check.
    text(&node.run("pgbench", "bench", &["-i"]).await);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn psql_lists_and_describes() {
    let node = Node::insecure().await;
    let client = node.database("shop").await;
    client
        .batch_execute(
            "CREATE TABLE customer (id INTEGER PRIMARY KEY, name VARCHAR(40) NOT NULL DEFAULT 'x', mail TEXT UNIQUE); \
             CREATE TABLE \"Order\" (id INTEGER PRIMARY KEY, customer_id INT REFERENCES customer(id) ON DELETE CASCADE, \
             total NUMERIC(10,2)); \
             CREATE INDEX order_customer ON \"Order\" (customer_id DESC) WHERE total > 0; \
             CREATE VIEW rich AS SELECT * FROM customer; \
             CREATE TRIGGER tr AFTER INSERT ON customer BEGIN SELECT 1; END",
        )
        .await
        .unwrap();
    let psql = async |commands: &[&str]| {
        let mut arguments = vec!["-X", "-A", "-v", "ON_ERROR_STOP=1"];
        for command in commands {
            arguments.extend(["-c", command]);
        }
        text(&node.run("psql", "shop", &arguments).await)
    };

    let databases = psql(&["\\l"]).await;
    assert!(databases.contains("shop|anna") || databases.contains("shop|fulmar"), "{databases}");
    assert!(psql(&["\\l sho*"]).await.contains("(1 row)"));

    let tables = psql(&["\\dt"]).await;
    assert!(tables.contains("public|customer|table|") && tables.contains("public|Order|table|"), "{tables}");
    assert!(!tables.contains("rich"), "{tables}");
    assert!(psql(&["\\d"]).await.contains("public|rich|view|"));
    assert!(psql(&["\\dt c*"]).await.contains("(1 row)"));
    assert!(psql(&["\\di"]).await.contains("public|order_customer|index|fulmar|Order"));
    assert!(psql(&["\\dt+", "\\dv", "\\dn", "\\ds", "\\conninfo"]).await.contains("public"));
    assert!(psql(&["\\du"]).await.contains("fulmar|Superuser"));

    let customer = psql(&["\\d customer"]).await;
    for line in [
        "Table \"public.customer\"",
        "id|bigint||not null|",
        "name|character varying(40)||not null|'x'",
        "\"customer_pkey\" PRIMARY KEY, btree (id)",
        "UNIQUE CONSTRAINT, btree (mail)",
        // psql quotes the already quoted name again, also with PostgreSQL.
        "TABLE \"\"Order\"\" CONSTRAINT \"Order_customer_id_fkey\" FOREIGN KEY (customer_id) REFERENCES customer(id) ON DELETE CASCADE",
        "tr AFTER INSERT ON customer",
    ] {
        assert!(customer.contains(line), "{line} in {customer}");
    }
    let order = psql(&["\\d \"Order\""]).await;
    for line in [
        "\"order_customer\" btree (customer_id DESC) WHERE total > 0",
        "\"Order_customer_id_fkey\" FOREIGN KEY (customer_id) REFERENCES customer(id) ON DELETE CASCADE",
    ] {
        assert!(order.contains(line), "{line} in {order}");
    }
    assert!(psql(&["\\d+ rich"]).await.contains("View \"public.rich\""));
    assert!(psql(&["\\d order_customer"]).await.contains("Index \"public.order_customer\""));

    let missing = node.run("psql", "shop", &["-X", "-c", "\\d nothing"]).await;
    assert!(String::from_utf8_lossy(&missing.stderr).contains("Did not find any relation named \"nothing\""));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn psql_runs_sql() {
    let node = Node::insecure().await;
    node.database("shop").await;
    let psql = async |command: &str| {
        text(&node.run("psql", "shop", &["-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", command]).await)
    };
    assert_eq!(psql("SELECT 1 AS a, NULL AS b, 'x' AS c").await, "1||x\n");
    assert_eq!(psql("SELECT current_database(), current_user").await, "shop|anna\n");
    assert!(psql("SELECT version()").await.starts_with("PostgreSQL 15.0 (Fulmar"));
    assert_eq!(
        psql("CREATE TABLE t (a INT, b BOOLEAN); INSERT INTO t VALUES (1, true); SELECT * FROM t").await,
        "CREATE TABLE\nINSERT 0 1\n1|t\n"
    );
    assert_eq!(psql("VACUUM t").await, "VACUUM\n");
    assert_eq!(psql("TRUNCATE t").await, "TRUNCATE TABLE\n");
    assert_eq!(psql("SELECT datname FROM pg_database WHERE datname = 'shop'").await, "shop\n");

    let path = node.directory.path().join("rows");
    std::fs::write(&path, "1\tt\n2\t\\N\n").unwrap();
    assert_eq!(psql(&format!("\\copy t from '{}'", path.display())).await, "COPY 2\n");
    assert_eq!(psql("SELECT count(*), count(b) FROM t").await, "2|1\n");
    node.stop().await;
}
