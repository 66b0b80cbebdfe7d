//! Tokens for HTTP, and the metrics that they show.

use std::time::Instant;

use crate::common::{Node, connect, state};
use tokio_postgres::{Client, SimpleQueryMessage};

/// The response to a request for the metrics.
async fn metrics(node: &Node, token: Option<&str>) -> String {
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n"));
    node.get("/metrics", &token.unwrap_or_default()).await
}

async fn create(admin: &Client, definition: &str) -> String {
    let answer = admin.simple_query(&format!("CREATE TOKEN {definition}")).await.unwrap();
    let secret = answer.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get("token"),
        _ => None,
    });
    secret.unwrap().to_owned()
}

pub async fn admin(node: &Node) -> Client {
    node.catalog.alter_user_password("fulmar", Some(fulmar_gateway::scram_verifier("x"))).await.unwrap();
    let mut config = node.config("fulmar", "fulmar");
    config.password("x");
    connect(&config).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn index_lists_the_pages_without_a_token() {
    let node = Node::start(|_| {}).await;
    let index = node.get("/", "").await;
    assert!(index.starts_with("HTTP/1.1 200") && index.contains("content-type: text/plain"), "{index}");
    for page in ["/console", "/healthz", "/metrics"] {
        assert!(index.contains(&format!("\n{page} ")), "{index}");
        assert!(!node.get(page, "").await.starts_with("HTTP/1.1 404"), "{page}");
    }
    assert!(node.get("/nothing", "").await.starts_with("HTTP/1.1 404"));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_require_a_token_and_show_its_scope() {
    let node = Node::start(|_| {}).await;
    let admin = admin(&node).await;
    for statement in
        ["CREATE USER anna PASSWORD 'a'", "CREATE DATABASE shop OWNER anna", "CREATE DATABASE other"]
    {
        admin.batch_execute(statement).await.unwrap();
    }
    assert!(node.health().await.starts_with("HTTP/1.1 200"));
    let refused = metrics(&node, None).await;
    assert!(refused.starts_with("HTTP/1.1 401") && refused.contains("www-authenticate: Bearer"), "{refused}");
    let (all, shop) = (create(&admin, "all").await, create(&admin, "shop FOR DATABASE shop").await);
    // The same secret with an expired token, in place of a valid one.
    let expired = create(&admin, "expired").await;
    let hash = node.catalog.drop_token("expired").await.unwrap().hash.clone();
    node.catalog.create_token("expired", hash, None, Some(0)).await.unwrap();
    assert!(metrics(&node, Some(&all)).await.contains("\nfulmar_sessions "));
    for header in [format!("Authorization: bearer  {all} \r\n"), format!("authorization: BEARER {all}\r\n")] {
        assert!(node.get("/metrics", &header).await.starts_with("HTTP/1.1 200"), "{header}");
    }
    let of_shop = metrics(&node, Some(&shop)).await;
    assert!(
        of_shop.starts_with("HTTP/1.1 200") && of_shop.contains("fulmar_tenant_sessions{tenant=\"shop\"} 0")
    );
    assert!(!of_shop.contains("\nfulmar_sessions ") && !of_shop.contains("\"fulmar\""), "{of_shop}");
    for wrong in
        [expired.as_str(), "", "fulmar_", &all[..46], &format!("{all}0"), &all.replace("fulmar_", "FULMAR_")]
    {
        assert!(metrics(&node, Some(wrong)).await.starts_with("HTTP/1.1 401"), "{wrong}");
    }
    for header in
        ["Authorization: Basic Zm86YmFy\r\n", "Authorization: Bearer\r\n", "Authorization: \u{fc}\r\n"]
    {
        assert!(node.get("/metrics", header).await.starts_with("HTTP/1.1 401"), "{header}");
    }

    // A token refers to its tenant, not to the name, and is dropped with the tenant.
    admin.batch_execute("ALTER DATABASE shop RENAME TO store").await.unwrap();
    assert!(metrics(&node, Some(&shop)).await.contains("{tenant=\"store\"}"));
    let listed =
        "SELECT name || ' ' || coalesce(database, '-') || ' ' || (expires IS NULL) FROM fulmar.tokens";
    let names = async |client: &Client| {
        let rows = client.query(listed, &[]).await.unwrap();
        rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>()
    };
    assert_eq!(names(&admin).await, ["all - 1", "expired - 0", "shop store 1"]);
    let mut config = node.config("store", "anna");
    config.password("a");
    let anna = connect(&config).await.unwrap();
    assert_eq!(names(&anna).await, ["shop store 1"]);
    assert_eq!(state(anna.batch_execute("CREATE TOKEN mine FOR DATABASE store").await), "42501");
    assert_eq!(state(anna.batch_execute("DROP TOKEN shop").await), "42501");
    drop(anna);
    admin.batch_execute("DROP DATABASE store WITH (FORCE)").await.unwrap();
    assert!(metrics(&node, Some(&shop)).await.starts_with("HTTP/1.1 401"));
    admin.batch_execute("DROP TOKEN all; ").await.unwrap();
    assert!(metrics(&node, Some(&all)).await.starts_with("HTTP/1.1 401"));
    admin.batch_execute("DROP TOKEN IF EXISTS all").await.unwrap();
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_created_and_dropped() {
    let node = Node::insecure().await;
    let admin = node.database("shop").await;
    drop(admin);
    let admin = node.client("fulmar").await;
    create(&admin, "\"The 1st\" FOR DATABASE shop EXPIRES IN '90d'").await;
    // The extended protocol describes the result before the token is created.
    let row = admin.query_one("CREATE TOKEN other", &[]).await.unwrap();
    assert!(row.get::<_, &str>("token").starts_with("fulmar_"));
    for (statement, expected) in [
        ("CREATE TOKEN other", "42710"),
        ("CREATE TOKEN x FOR DATABASE missing", "3D000"),
        ("CREATE TOKEN x EXPIRES IN 'soon'", "22023"),
        ("CREATE TOKEN x EXPIRES IN '90'", "22023"),
        ("CREATE TOKEN x EXPIRES", "42601"),
        ("CREATE TOKEN x y", "42601"),
        ("CREATE TOKEN", "42601"),
        ("CREATE TOKEN \"\"", "42602"),
        ("DROP TOKEN missing", "42704"),
        ("BEGIN; CREATE TOKEN x", "25001"),
    ] {
        assert_eq!(state(admin.batch_execute(statement).await), expected, "{statement}");
        admin.batch_execute("ROLLBACK").await.unwrap();
    }
    assert!(metrics(&node, None).await.starts_with("HTTP/1.1 200"), "--insecure requires no token");
    node.stop().await;

    let node = Node::start(|config| config.public_metrics = true).await;
    assert!(metrics(&node, None).await.starts_with("HTTP/1.1 200"));
    node.stop().await;
}

/// A client that tries unknown tokens is delayed like one that guesses passwords. The delay also
/// applies to a valid token from the same address.
#[tokio::test(flavor = "multi_thread")]
async fn guessing_tokens_is_slow() {
    let node = Node::start(|_| {}).await;
    let token = create(&admin(&node).await, "all").await;
    // An address has ten free attempts, and requests without a token do not count.
    for n in 0..11 {
        assert!(metrics(&node, Some(&format!("guess{n}"))).await.starts_with("HTTP/1.1 401"));
        assert!(metrics(&node, None).await.starts_with("HTTP/1.1 401"));
    }
    let start = Instant::now();
    assert!(metrics(&node, Some(&token)).await.starts_with("HTTP/1.1 200"));
    assert!(start.elapsed().as_millis() >= 100);
    // Concurrent attempts are not answered sooner.
    let guesses = futures::future::join_all((0..3).map(|_| metrics(&node, Some("guess"))));
    for answer in guesses.await {
        assert!(answer.starts_with("HTTP/1.1 401"));
    }
    assert!(start.elapsed().as_millis() >= 100 + 200 + 400);
    node.stop().await;
}
