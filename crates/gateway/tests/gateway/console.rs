//! The console's API: authorization, headers, limits, actions and the event stream.

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_postgres::{Client, SimpleQueryMessage};

use crate::common::{Node, wait_until, with_timeout};

/// The limits of event streams, and of a request's body.
const MAX_STREAMS: usize = 16;
const MAX_BODY_BYTES: usize = 16 << 10;

async fn create(admin: &Client, definition: &str) -> String {
    let answer = admin.simple_query(&format!("CREATE TOKEN {definition}")).await.unwrap();
    let secret = answer.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get("token"),
        _ => None,
    });
    secret.unwrap().to_owned()
}

fn authorization(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

/// The status and the JSON body of a response.
fn parse(answer: &str) -> (u16, Value) {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap_or(Value::Null))
}

async fn get(node: &Node, path: &str, token: &str) -> (u16, Value) {
    parse(&node.get(&format!("/console/api/{path}"), &authorization(token)).await)
}

async fn post(node: &Node, token: &str, body: &str) -> (u16, Value) {
    let mut stream = TcpStream::connect(node.http.local_addr()).await.unwrap();
    let request = format!(
        "POST /console/api/actions HTTP/1.1\r\nHost: x\r\n{}Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        authorization(token),
        body.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    parse(&answer)
}

/// The values of a column.
fn column(table: &Value, name: &str) -> Vec<Value> {
    let index = table["columns"].as_array().unwrap().iter().position(|column| column == name).unwrap();
    table["rows"].as_array().unwrap().iter().map(|row| row[index].clone()).collect()
}

/// An open event stream.
struct Stream {
    stream: TcpStream,
    text: String,
}

impl Stream {
    async fn open(node: &Node, token: &str) -> Stream {
        let mut stream = TcpStream::connect(node.http.local_addr()).await.unwrap();
        let request = format!(
            "GET /console/api/stream HTTP/1.1\r\nHost: x\r\n{}Connection: close\r\n\r\n",
            authorization(token)
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        Stream { stream, text: String::new() }
    }

    /// Reads until the text so far contains `expected`. Returns false at the end of the connection.
    async fn find(&mut self, expected: &str) -> bool {
        let mut buffer = vec![0; 65_536];
        while !self.text.contains(expected) {
            let read = with_timeout(expected, self.stream.read(&mut buffer)).await.unwrap_or(0);
            if read == 0 {
                return false;
            }
            self.text.push_str(&String::from_utf8_lossy(&buffer[..read]));
        }
        true
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn page_is_public_and_has_strict_headers() {
    let node = Node::start(|_| {}).await;
    assert!(node.get("/console", "").await.starts_with("HTTP/1.1 308"));
    for path in ["/console/", "/console/nothing.js", "/console/api/overview"] {
        let answer = node.get(path, "").await;
        for header in [
            "content-security-policy: default-src 'self';",
            "frame-ancestors 'none'",
            "x-frame-options: DENY",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
        ] {
            assert!(answer.contains(header), "{path} must have {header}: {answer}");
        }
        assert!(!answer.to_lowercase().contains("set-cookie"), "{answer}");
    }
    let page = node.get("/console/", "").await;
    assert!(page.starts_with("HTTP/1.1 200") && page.contains("text/html"), "{page}");
    assert!(node.get("/console/nothing.js", "").await.starts_with("HTTP/1.1 404"));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn api_requires_the_token_of_an_administrator() {
    for insecure in [false, true] {
        let node = Node::start(|config| config.insecure = insecure).await;
        let admin = match insecure {
            true => node.client("fulmar").await,
            false => crate::tokens::admin(&node).await,
        };
        admin.batch_execute("CREATE DATABASE shop").await.unwrap();
        let token = create(&admin, "ops FOR ADMIN EXPIRES IN '1h'").await;
        for (other, expected) in [
            (create(&admin, "scraper").await, 403),
            (create(&admin, "shop FOR DATABASE shop").await, 403),
            (token.replace("fulmar_", "FULMAR_"), 401),
            (String::new(), 401),
        ] {
            for path in ["overview", "stream", "search/s", "tenants/shop"] {
                let (status, body) = get(&node, path, &other).await;
                assert_eq!(status, expected, "{path}: {body}");
                assert!(body["error"]["message"].is_string() && body.get("nodes").is_none(), "{body}");
            }
            let (status, _) = post(&node, &other, r#"{"action":"pin","database":"shop"}"#).await;
            assert_eq!(status, expected);
        }
        // The token is accepted in the header only.
        for (path, header) in [
            (format!("/console/api/overview?token={token}"), String::new()),
            ("/console/api/overview".to_owned(), format!("Cookie: token={token}\r\n")),
        ] {
            assert!(node.get(&path, &header).await.starts_with("HTTP/1.1 401"), "{path}");
        }
        assert_eq!(get(&node, "overview", &token).await.0, 200);
        admin.batch_execute("DROP TOKEN ops").await.unwrap();
        assert_eq!(get(&node, "overview", &token).await.0, 401);
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sections_are_those_of_sql() {
    let node = Node::insecure().await;
    let shop = node.database("shop").await;
    shop.batch_execute("CREATE TABLE t (a); INSERT INTO t VALUES (1)").await.unwrap();
    let admin = node.client("fulmar").await;
    admin.batch_execute("CREATE DATABASE \"<b>it's \"\"x</b>\"").await.unwrap();
    admin.batch_execute("ALTER DATABASE shop SET latency_objective = '20ms'").await.unwrap();
    let token = create(&admin, "ops FOR ADMIN").await;

    let (status, overview) = get(&node, "overview", &token).await;
    assert_eq!((status, overview.get("error")), (200, None), "{overview}");
    let forecast = &overview["forecast"];
    assert!(forecast.is_null() || forecast["rows"] == json!([]), "there is no controller: {forecast}");
    let placements = &overview["placements"];
    assert_eq!(column(placements, "tenant"), ["shop", "<b>it's \"x</b>"], "{placements}");
    assert_eq!(column(placements, "objective"), [json!("20ms"), Value::Null]);
    let numbers = ["cpu", "requests_per_s"].map(|name| column(&overview["node_load"], name));
    assert!(numbers.iter().flatten().all(Value::is_number), "{}", overview["node_load"]);
    let kinds = column(&overview["events"], "kind");
    assert_eq!(kinds[0], "token.created", "the newest event comes first: {kinds:?}");
    assert!(column(&overview["events"], "id").iter().all(Value::is_i64));

    let (_, found) = get(&node, "search/%3Cb%3Eit's", &token).await;
    assert_eq!(column(&found, "tenant"), ["<b>it's \"x</b>"]);
    let (_, found) = get(&node, "search/%25", &token).await;
    assert!(column(&found, "tenant").is_empty(), "a prefix is not a pattern: {found}");

    for name in ["shop", "%3Cb%3Eit's%20%22x%3C%2Fb%3E"] {
        let (status, tenant) = get(&node, &format!("tenants/{name}"), &token).await;
        assert_eq!(status, 200, "{tenant}");
        let limits = column(&tenant["limits"], "name");
        assert!(limits.contains(&json!("max_size")) && limits.contains(&json!("durability")), "{limits:?}");
        assert_eq!(tenant["stats"]["rows"].as_array().unwrap().len(), 1, "{tenant}");
        assert!(tenant["history"]["rows"].is_array(), "{tenant}");
    }
    let (_, tenant) = get(&node, "tenants/shop", &token).await;
    let statements = column(&tenant["top_statements"], "statement");
    assert!(statements.contains(&json!("INSERT INTO t VALUES (?)")), "{tenant}");
    let read_by_console = |text: &&Value| text.as_str().unwrap().contains("fulmar.");
    assert!(!statements.iter().any(|text| read_by_console(&text)), "the console's own: {statements:?}");
    assert_eq!(overview["slow_statements"]["rows"], json!([]), "{overview}");
    let (status, missing) = get(&node, "tenants/missing", &token).await;
    assert_eq!((status, &missing["error"]["state"]), (422, &json!("3D000")), "{missing}");
    assert_eq!(get(&node, "tenants/a%00b", &token).await.0, 400);
    // The console's sessions end with their requests, or soon after the last page was closed.
    wait_until("no internal sessions", async || node.gateway.sessions() == 2).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn actions_are_administrative_statements() {
    let node = Node::insecure().await;
    let shop = node.database("shop").await;
    shop.batch_execute("CREATE TABLE t (a INTEGER); INSERT INTO t VALUES (1)").await.unwrap();
    node.engine.flush().await.unwrap();
    shop.batch_execute("INSERT INTO t VALUES (2)").await.unwrap();
    let admin = node.client("fulmar").await;
    let token = create(&admin, "ops FOR ADMIN").await;

    // A node without a cluster has no other nodes: the statement's error is the answer.
    let (status, body) = post(&node, &token, r#"{"action":"pin","database":"shop"}"#).await;
    assert_eq!(status, 422, "{body}");
    assert!(body["error"]["state"].is_string() && body["error"]["message"].is_string(), "{body}");
    let (_, tenant) = get(&node, "tenants/shop", &token).await;
    let point = &column(&tenant["history"], "time")[0];
    let restore = json!({ "action": "restore", "database": "shop", "timestamp": point }).to_string();
    assert_eq!(post(&node, &token, &restore).await, (200, json!({ "state": "done" })));
    let rows = node.client("shop").await.query_one("SELECT count(*) FROM t", &[]).await.unwrap();
    assert_eq!(rows.get::<_, i64>(0), 1);
    let (status, _) = post(&node, &token, r#"{"action":"mode","mode":"on'; DROP DATABASE shop"}"#).await;
    assert_eq!(status, 422);
    assert!(node.catalog.tenant("shop").is_some());

    for (body, expected) in [
        ("", 400),
        ("{}", 400),
        (r#"{"action":"drop","database":"shop"}"#, 400),
        (r#"{"action":"pin","database":"shop","more":1}"#, 400),
        (r#"{"action":"pin","database":"a\u0000b"}"#, 400),
        (" ".repeat(MAX_BODY_BYTES + 1).as_str(), 413),
    ] {
        let (status, answer) = post(&node, &token, body).await;
        assert_eq!(status, expected, "{answer}");
        assert!(answer["error"]["message"].is_string(), "{answer}");
    }
    assert!(node.get("/console/api/actions", &authorization(&token)).await.starts_with("HTTP/1.1 405"));

    let sql = "SELECT details ->> 'token', details ->> 'statement' FROM fulmar.events \
               WHERE kind = 'console.statement' ORDER BY id LIMIT 1";
    let event = admin.simple_query(sql).await.unwrap();
    let SimpleQueryMessage::Row(event) = &event[1] else { panic!("{event:?}") };
    assert_eq!((event.get(0), event.get(1)), (Some("ops"), Some("ALTER DATABASE \"shop\" PIN")));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn event_stream_sends_changes_until_its_token_is_dropped() {
    let node = Node::insecure().await;
    let admin = node.client("fulmar").await;
    let token = create(&admin, "ops FOR ADMIN").await;
    let mut stream = Stream::open(&node, &token).await;
    assert!(stream.find("event: events\ndata: {").await, "{}", stream.text);
    assert!(stream.text.starts_with("HTTP/1.1 200") && stream.text.contains("text/event-stream"));
    assert!(!stream.text.contains("database.created"), "{}", stream.text);
    admin.batch_execute("CREATE DATABASE shop").await.unwrap();
    assert!(stream.find("database.created").await, "a change must be sent: {}", stream.text);
    admin.batch_execute("DROP TOKEN ops").await.unwrap();
    assert!(stream.find("event: end\n").await, "{}", stream.text);
    assert!(!stream.find("nothing").await, "the stream must end");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn event_streams_are_limited_and_do_not_delay_a_shutdown() {
    let node = Node::insecure().await;
    let admin = node.client("fulmar").await;
    let token = create(&admin, "ops FOR ADMIN").await;
    let mut streams = Vec::new();
    for _ in 0..MAX_STREAMS {
        let mut stream = Stream::open(&node, &token).await;
        assert!(stream.find("event: events\n").await, "{}", stream.text);
        streams.push(stream);
    }
    let (status, body) = get(&node, "stream", &token).await;
    assert_eq!(status, 503, "{body}");
    // A closed stream makes room.
    streams.pop();
    wait_until("a free stream", async || {
        let mut stream = Stream::open(&node, &token).await;
        stream.find("\r\n\r\n").await && stream.text.starts_with("HTTP/1.1 200")
    })
    .await;
    // All pages share one session.
    assert_eq!(node.gateway.sessions(), 2, "the administrator's session and the console's");
    with_timeout("the shutdown", node.stop()).await;
    for mut stream in streams {
        assert!(!stream.find("nothing").await, "a shutdown must end all streams");
    }
}
