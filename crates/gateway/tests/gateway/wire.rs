//! Protocol messages that client libraries do not send.

use crate::common::{Node, state, wait_until, with_timeout};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Sends bytes on a new connection, and returns everything that the server sends before it closes
/// the connection.
async fn conversation(node: &Node, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(node.gateway.local_addr()).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    // The server resets the connection if it closes it with unread input. What was received before
    // is still valid.
    let _ = stream.read_to_end(&mut answer).await;
    answer
}

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    [&[kind], &(body.len() as u32 + 4).to_be_bytes()[..], body].concat()
}

fn startup(database: &str) -> Vec<u8> {
    let body =
        [&196_608u32.to_be_bytes()[..], b"user\0anna\0database\0", database.as_bytes(), b"\0\0"].concat();
    [&(body.len() as u32 + 4).to_be_bytes()[..], &body].concat()
}

/// The kinds of the messages. Errors are followed by their SQLSTATE.
fn kinds(mut answer: &[u8]) -> String {
    let mut kinds = String::new();
    while let Some((kind, rest)) = answer.split_first() {
        let length = u32::from_be_bytes(rest[..4].try_into().unwrap()) as usize;
        kinds.push(char::from(*kind));
        if *kind == b'E' {
            let fields = &rest[4..length];
            let state = fields.split(|byte| *byte == 0).find_map(|field| field.strip_prefix(b"C")).unwrap();
            kinds.push_str(&format!("({})", String::from_utf8_lossy(state)));
        }
        answer = &rest[length..];
    }
    kinds
}

/// The messages after the first ReadyForQuery.
async fn session(node: &Node, messages: &[Vec<u8>]) -> String {
    let all = [startup("t1"), messages.concat(), message(b'X', b"")].concat();
    let kinds = kinds(&conversation(node, &all).await);
    kinds.split_once('Z').unwrap_or_else(|| panic!("no session: {kinds}")).1.to_owned()
}

const SYNC: &[u8] = b"S\0\0\0\x04";

#[tokio::test(flavor = "multi_thread")]
async fn extended_query_messages_in_unusual_orders() {
    let node = Node::insecure().await;
    node.database("t1").await.batch_execute("CREATE TABLE t (a INTEGER PRIMARY KEY)").await.unwrap();
    let sync = SYNC.to_vec();
    let parse = |name: &str, sql: &str| message(b'P', format!("{name}\0{sql}\0\0\0").as_bytes());
    let bind = |portal: &str, name: &str| message(b'B', format!("{portal}\0{name}\0\0\0\0\0\0\0").as_bytes());
    let execute =
        |portal: &str, limit: u8| message(b'E', &[portal.as_bytes(), &[0, 0, 0, 0, limit]].concat());
    let describe = |target: char, name: &str| message(b'D', format!("{target}{name}\0").as_bytes());
    let close = |target: char, name: &str| message(b'C', format!("{target}{name}\0").as_bytes());

    // After an error, messages are skipped up to Sync.
    let skipped =
        [parse("", "SELEC"), bind("", ""), execute("", 0), sync.clone(), parse("", "SELECT 1"), sync.clone()];
    assert_eq!(session(&node, &skipped).await, "E(42601)Z1Z");
    // Two rows, one at a time. The portal is closed with its transaction.
    let sql = "VALUES (1), (2)";
    let portions = [
        parse("s", sql),
        bind("p", "s"),
        describe('P', "p"),
        execute("p", 1),
        execute("p", 1),
        execute("p", 1),
        sync.clone(),
        execute("p", 1),
        sync.clone(),
    ];
    assert_eq!(session(&node, &portions).await, "12TDsDsCZE(34000)Z");
    // Unknown, duplicate and closed names.
    let names = [
        bind("", "missing"),
        sync.clone(),
        parse("s", "SELECT 1"),
        parse("s", "SELECT 1"),
        sync.clone(),
        close('S', "s"),
        close('S', "missing"),
        bind("", "s"),
        sync.clone(),
    ];
    assert_eq!(session(&node, &names).await, "E(26000)Z1E(42P05)Z33E(26000)Z");
    // The empty statement has no description.
    let empty = [parse("", ""), bind("", ""), describe('P', ""), execute("", 0), sync.clone()];
    assert_eq!(session(&node, &empty).await, "12nIZ");
    // A pipeline is one transaction: the failure of the second insert rolls back the first.
    let insert = "INSERT INTO t VALUES (1)";
    let pipeline = [
        parse("", insert),
        bind("", ""),
        execute("", 0),
        bind("", ""),
        execute("", 0),
        sync.clone(),
        message(b'Q', b"SELECT a FROM t\0"),
    ];
    assert_eq!(session(&node, &pipeline).await, "12C2E(23505)ZTCZ");
    // The numbers of parameters and formats are checked.
    let parameters = [parse("", "SELECT $1"), bind("", ""), sync.clone()];
    assert_eq!(session(&node, &parameters).await, "1E(08P01)Z");
    // Flush, and COPY messages outside of a COPY.
    let strays =
        [message(b'H', b""), message(b'd', b"x"), message(b'c', b""), message(b'f', b"x\0"), sync.clone()];
    assert_eq!(session(&node, &strays).await, "Z");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_results_of_a_pipeline_are_sent_before_its_end() {
    const DESCRIBES: usize = 200;
    const PARAMETERS: usize = 65_535;
    let node = Node::insecure().await;
    drop(node.database("t1").await);
    let types = [0, 0, 0, 25].repeat(PARAMETERS);
    let parse = message(b'P', &[b"\0SELECT 1\0\xff\xff", &types[..]].concat());
    let describe = message(b'D', b"S\0");
    let mut stream = TcpStream::connect(node.gateway.local_addr()).await.unwrap();
    // Neither Sync nor Flush.
    stream.write_all(&[startup("t1"), parse, describe.repeat(DESCRIBES)].concat()).await.unwrap();
    let (mut received, mut piece) = (0, vec![0; 1 << 20]);
    while received < DESCRIBES * PARAMETERS * 4 {
        let count = with_timeout("descriptions before the Sync", stream.read(&mut piece)).await.unwrap();
        assert!(count > 0, "the connection ends after {received} bytes");
        received += count;
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn simple_query_messages() {
    let node = Node::insecure().await;
    node.database("t1").await.batch_execute("CREATE TABLE t (a INTEGER)").await.unwrap();
    let query = |sql: &str| message(b'Q', format!("{sql}\0").as_bytes());
    assert_eq!(session(&node, &[query("")]).await, "IZ");
    assert_eq!(session(&node, &[query(" ; -- nothing\n;")]).await, "IZ");
    assert_eq!(session(&node, &[query("SELECT 1; ; SELECT a FROM t;")]).await, "TDCTCZ");
    assert_eq!(session(&node, &[query("SELECT 1; SELEC; SELECT 2")]).await, "TDCE(42601)Z");
    assert_eq!(
        session(
            &node,
            &[query("SELECT '\u{fffd}'")
                .into_iter()
                .map(|byte| if byte > 0x7f { 0xff } else { byte })
                .collect()]
        )
        .await,
        "E(22021)Z"
    );
    // The messages after a failed COPY are ignored. After a COPY, the rest of the script is
    // executed.
    let copy = [query("COPY t FROM STDIN"), message(b'd', b"x\ty\n"), message(b'c', b""), query("SELECT 1")];
    assert_eq!(session(&node, &copy).await, "GE(22P02)ZTDCZ");
    let copy = [query("COPY t FROM STDIN; SELECT a FROM t"), message(b'd', b"1\n2"), message(b'c', b"")];
    assert_eq!(session(&node, &copy).await, "GCTDDCZ");
    let copy = [query("COPY t FROM STDIN"), message(b'f', b"no\0")];
    assert_eq!(session(&node, &copy).await, "GE(57014)Z");
    let copy = [query("COPY t FROM STDIN"), query("SELECT 1")];
    assert_eq!(session(&node, &copy).await, "GE(08P01)Z");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_input_closes_only_its_connection() {
    let node = Node::insecure().await;
    let client = node.database("t1").await;
    for broken in [
        &b"Q\0\0\0\x03"[..],
        b"Q\xff\xff\xff\xff",
        b"?\0\0\0\x04",
        b"B\0\0\0\x0a\0\0\0\0\xff\xff",
        b"F\0\0\0\x04",
        b"P\0\0\0\x06xy",
    ] {
        assert_eq!(session(&node, &[broken.to_vec()]).await, "E(08P01)", "{broken:?}");
    }
    for silent in [
        &b"\0\0\0\x04\0\0\0\0"[..],
        b"\xff\xff\xff\xff\0\0\0\0",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\x08\x04\xd2\x16\x2e",
    ] {
        assert_eq!(conversation(&node, silent).await, b"", "{silent:?}");
    }
    // Without a certificate, an SSLRequest is answered with N, and the connection can be used
    // without TLS.
    let plain = [&[0, 0, 0, 8][..], &80_877_103u32.to_be_bytes()].concat();
    let mut stream = TcpStream::connect(node.gateway.local_addr()).await.unwrap();
    stream.write_all(&plain).await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'N');
    // Bytes sent together with an SSLRequest may have been injected by an attacker: the connection
    // is closed.
    let smuggled = [plain, startup("t1")].concat();
    assert_eq!(conversation(&node, &smuggled).await, b"");
    client.batch_execute("SELECT 1").await.unwrap();
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_request_with_a_wrong_secret_does_nothing() {
    const ENDLESS: &str =
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n";
    let node = Node::insecure().await;
    let client = node.database("t1").await;
    let observer = node.client("t1").await;
    let process: i64 = client.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let token = client.cancel_token();
    let running = tokio::spawn(async move { state(client.batch_execute(ENDLESS).await) });
    let is_active = async || {
        let sql = format!("SELECT 1 FROM pg_stat_activity WHERE pid = {process} AND query = '{ENDLESS}'");
        observer.query_opt(&sql, &[]).await.unwrap().is_some()
    };
    wait_until("the statement runs", is_active).await;
    // The secret is random.
    let process = i32::try_from(process).unwrap().to_be_bytes();
    let cancel = [&16u32.to_be_bytes()[..], &80_877_102u32.to_be_bytes(), &process, &[1, 2, 3, 4]].concat();
    // The statement would end during the later ones.
    for _ in 0..20 {
        assert_eq!(conversation(&node, &cancel).await, b"", "it gets no answer");
        assert!(is_active().await && !running.is_finished());
    }
    token.cancel_query(tokio_postgres::NoTls).await.unwrap();
    assert_eq!(with_timeout("the cancelled statement", running).await.unwrap(), "57014");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnect_cancels_the_running_statement() {
    let node = Node::insecure().await;
    drop(node.database("t1").await);
    // The first result is too large to be buffered until the end of the script. Receiving it shows
    // that the script is running.
    let text = "SELECT printf('%100000d', 1); \
                WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n\0";
    let mut stream = TcpStream::connect(node.gateway.local_addr()).await.unwrap();
    stream.write_all(&[startup("t1"), message(b'Q', text.as_bytes())].concat()).await.unwrap();
    stream.read_exact(&mut vec![0; 100_000]).await.unwrap();
    assert!(node.gateway.sessions() > 0);
    drop(stream);
    // The statement would not end by itself.
    wait_until("the session has ended", async || node.gateway.sessions() == 0).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnect_behind_a_long_pipeline_is_detected() {
    let node = Node::insecure().await;
    drop(node.database("t1").await);
    let endless = b"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n\0";
    // More than the session reads ahead, and no more than the socket buffers can hold in addition.
    // Otherwise the end of the stream would not be received.
    let pipelined = message(b'Q', &[&b";".repeat(4000)[..], b"\0"].concat()).repeat(24);
    let all = [startup("t1"), message(b'Q', endless), pipelined].concat();
    let mut stream = TcpStream::connect(node.gateway.local_addr()).await.unwrap();
    stream.write_all(&all).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut answer = Vec::new();
    // The connection may also be reset. Then reading fails, which ends it too.
    drop(with_timeout("the statement of a closed connection ends", stream.read_to_end(&mut answer)).await);
    node.stop().await;
}
