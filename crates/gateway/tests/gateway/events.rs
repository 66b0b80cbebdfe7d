//! The event log: what it records, which users may read it, and that it contains no secrets.

use std::path::Path;
use std::sync::Arc;

use crate::common::{Node, connect, state};
use fulmar_gateway::events::{Event, EventLog, Kind};
use tokio_postgres::{Client, SimpleQueryMessage};

/// Secrets that can be searched for.
const SECRETS: [&str; 3] = ["hunter2-of-root", "hunter2-of-anna", "hunter2-guessed"];

async fn log_in(node: &Node, database: &str, user: &str, password: &str) -> Client {
    let mut config = node.config(database, user);
    config.password(password);
    connect(&config).await.unwrap()
}

/// A node with password authentication and an event log, and a session of its superuser.
async fn node_with_event_log(directory: &Path) -> (Node, Client) {
    let event_log = Arc::new(EventLog::open(directory).unwrap());
    let node = Node::start(|config| config.event_log = event_log).await;
    let verifier = fulmar_gateway::scram_verifier(SECRETS[0]);
    node.catalog.alter_user_password("fulmar", Some(verifier)).await.unwrap();
    let admin = log_in(&node, "fulmar", "fulmar", SECRETS[0]).await;
    (node, admin)
}

/// Kind, database, user and details of all events that are visible to a client.
async fn events(client: &Client) -> Vec<(String, Option<String>, Option<String>, String)> {
    let sql =
        "SELECT kind, database, \"user\", coalesce(CAST(details AS TEXT), '') FROM fulmar.events ORDER BY id";
    let rows = client.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn administration_is_recorded_and_visible_to_owners() {
    let directory = tempfile::tempdir().unwrap();
    let (node, admin) = node_with_event_log(directory.path()).await;
    for statement in [
        "CREATE USER anna PASSWORD 'hunter2-of-anna'",
        "CREATE USER bert PASSWORD 'hunter2-of-anna'",
        "CREATE DATABASE shop OWNER anna",
        "CREATE DATABASE other TEMPLATE shop",
        "ALTER DATABASE shop SET max_size = '10MB'",
        "ALTER DATABASE shop RESET ALL",
        "GRANT SELECT ON DATABASE shop TO bert",
        "REVOKE CONNECT ON DATABASE shop FROM bert",
        "ALTER DATABASE shop RENAME TO store",
        "CREATE TOKEN scraper FOR DATABASE store",
        "DROP TOKEN scraper",
        "ALTER USER bert PASSWORD 'hunter2-of-anna'",
        "DROP USER bert",
        "DROP DATABASE other",
        "VERIFY",
    ] {
        admin.batch_execute(statement).await.unwrap_or_else(|error| panic!("{statement}: {error}"));
    }
    // Failed statements cause no events.
    assert_eq!(state(admin.batch_execute("CREATE DATABASE store").await), "42P04");
    admin.batch_execute("DROP DATABASE IF EXISTS nothing; DROP USER IF EXISTS unknown").await.unwrap();

    let seen = events(&admin).await;
    let shown: Vec<(&str, Option<&str>)> = seen.iter().map(|e| (e.0.as_str(), e.1.as_deref())).collect();
    let expected = [
        ("user.created", None),
        ("user.created", None),
        ("database.created", Some("shop")),
        ("database.created", Some("other")),
        ("limit.changed", Some("shop")),
        ("limit.changed", Some("shop")),
        ("right.granted", Some("shop")),
        ("right.revoked", Some("shop")),
        ("database.renamed", Some("store")),
        ("token.created", Some("store")),
        ("token.dropped", Some("store")),
        ("user.password_changed", None),
        ("user.dropped", None),
        ("database.dropped", Some("other")),
        ("node.verified", None),
    ];
    assert_eq!(shown, expected);
    assert!(seen.iter().all(|event| event.2.as_deref() == Some("fulmar")));
    assert!(
        seen[6].3.contains("\"role\":\"bert\"") && seen[6].3.contains("\"right\":\"SELECT\""),
        "{}",
        seen[6].3
    );
    assert!(seen[3].3.contains("\"template\":\"shop\""), "{}", seen[3].3);
    let sql = "SELECT count(*) FROM fulmar.events WHERE address = '127.0.0.1' AND severity = 'info' \
               AND time > '2020-01-01' AND text <> ''";
    let complete: i64 = admin.query_one(sql, &[]).await.unwrap().get(0);
    assert_eq!(complete, seen.len() as i64);

    // The owner sees the events of the database, without names of other users.
    let anna = log_in(&node, "store", "anna", SECRETS[1]).await;
    let owner_events = events(&anna).await;
    let kinds: Vec<&str> = owner_events.iter().map(|event| event.0.as_str()).collect();
    let expected: Vec<&str> =
        expected.iter().filter(|e| matches!(e.1, Some("shop" | "store"))).map(|e| e.0).collect();
    assert_eq!(kinds, expected);
    assert!(
        owner_events.iter().all(|event| event.2.is_none() && !event.3.contains("bert")),
        "{owner_events:?}"
    );
    assert!(owner_events.iter().any(|event| event.3.contains("\"limit\":\"max_size\"")), "{owner_events:?}");
    assert_eq!(
        anna.query("SELECT 1 FROM fulmar.events WHERE address IS NOT NULL", &[]).await.unwrap().len(),
        0
    );
    // A user with only the CONNECT privilege sees nothing.
    admin.batch_execute("CREATE USER carl PASSWORD 'hunter2-of-anna'; ").await.unwrap();
    admin.batch_execute("GRANT CONNECT ON DATABASE store TO carl").await.unwrap();
    let carl = log_in(&node, "store", "carl", SECRETS[1]).await;
    assert!(events(&carl).await.is_empty());
    // A new database with the same name has its own events.
    drop((anna, carl));
    admin.batch_execute("DROP DATABASE store WITH (FORCE)").await.unwrap();
    admin.batch_execute("CREATE DATABASE store OWNER carl").await.unwrap();
    let carl = log_in(&node, "store", "carl", SECRETS[1]).await;
    assert_eq!(events(&carl).await.len(), 1);
    drop((admin, carl));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_caused_by_tenants_are_aggregated() {
    let directory = tempfile::tempdir().unwrap();
    let (node, admin) = node_with_event_log(directory.path()).await;
    admin.batch_execute("CREATE USER anna PASSWORD 'hunter2-of-anna'").await.unwrap();
    admin.batch_execute("CREATE DATABASE shop OWNER anna").await.unwrap();
    let anna = log_in(&node, "shop", "anna", SECRETS[1]).await;
    let other = log_in(&node, "shop", "anna", SECRETS[1]).await;
    let pid: i64 = other.query_one("SELECT pg_backend_pid() AS pid", &[]).await.unwrap().get(0);
    for _ in 0..20 {
        anna.batch_execute(&format!("SELECT pg_cancel_backend({pid})")).await.unwrap();
        anna.simple_query("COPY DATABASE TO STDOUT (FORMAT sqlite)").await.unwrap_or_default();
    }
    for user in ["unknown1", "anna", "unknown2"] {
        let mut config = node.config("shop", user);
        config.password(SECRETS[2]);
        assert_eq!(state(connect(&config).await), "28P01");
    }
    let kinds = |events: &[(String, Option<String>, Option<String>, String)], kind: &str| {
        events.iter().filter(|event| event.0 == kind).count()
    };
    let seen = events(&admin).await;
    for kind in ["session.cancelled", "database.exported", "login.failed"] {
        assert_eq!(kinds(&seen, kind), 1, "{kind}: {seen:?}");
    }
    // Actions of superusers are recorded individually.
    for _ in 0..2 {
        admin.batch_execute(&format!("SELECT pg_cancel_backend({pid})")).await.unwrap();
    }
    admin.batch_execute(&format!("SELECT pg_terminate_backend({pid})")).await.unwrap();
    let seen = events(&admin).await;
    assert_eq!((kinds(&seen, "session.cancelled"), kinds(&seen, "session.terminated")), (3, 1));
    drop((admin, anna, other));
    node.stop().await;

    // Aggregated events are written at shutdown, and found again at the next start.
    let event_log = EventLog::open(directory.path()).unwrap();
    event_log.record(Event::new(Kind::NodeStarted));
    let node = Node::start(|config| (config.insecure, config.event_log) = (true, Arc::new(event_log))).await;
    let seen = events(&node.client("fulmar").await).await;
    assert_eq!(kinds(&seen, "login.failed"), 2, "{seen:?}");
    let last = seen.iter().rfind(|event| event.0 == "login.failed").unwrap();
    assert!(last.3.contains("\"times\":2") && last.3.contains("\"unknown2\""), "{last:?}");
    assert_eq!(seen.last().map(|event| event.0.as_str()), Some("node.started"));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn event_log_contains_no_secrets() {
    let directory = tempfile::tempdir().unwrap();
    let (node, admin) = node_with_event_log(directory.path()).await;
    admin.batch_execute("CREATE USER anna PASSWORD 'hunter2-of-anna'").await.unwrap();
    admin.batch_execute("ALTER USER anna PASSWORD 'hunter2-of-anna'").await.unwrap();
    assert_eq!(state(admin.batch_execute("CREATE USER anna PASSWORD 'hunter2-of-anna'").await), "42710");
    let mut config = node.config("fulmar", "anna");
    config.password(SECRETS[2]);
    assert_eq!(state(connect(&config).await), "28P01");
    let made = admin.simple_query("CREATE TOKEN scraper").await.unwrap();
    let token = made.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    let token = token.unwrap().to_owned();
    let shown = format!("{:?}", events(&admin).await);
    let tokens = admin.query_one("SELECT * FROM fulmar.tokens", &[]).await.unwrap();
    let tokens = format!("{:?}", (0..tokens.len()).map(|n| tokens.columns()[n].name()).collect::<Vec<_>>());
    drop(admin);
    let data = node.directory.path().to_owned();
    let meta = std::fs::read(data.join("meta.db")).unwrap();
    node.stop().await;
    let mut written = Vec::new();
    for file in std::fs::read_dir(directory.path()).unwrap() {
        written.extend(std::fs::read(file.unwrap().path()).unwrap());
    }
    let written = String::from_utf8(written).unwrap();
    assert!(written.contains("token.created") && written.contains("login.failed"), "{written}");
    assert!(!tokens.contains("hash"), "{tokens}");
    for secret in SECRETS.iter().chain([&token.as_str()]) {
        assert!(!written.contains(secret) && !shown.contains(secret), "{secret}");
        assert!(!meta.windows(secret.len()).any(|window| window == secret.as_bytes()), "{secret} in meta.db");
    }
}
