//! Attacks with many small requests: connections, logins, cancel requests.

use futures::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_postgres::NoTls;

use crate::client::{self, Response};
use crate::test_bench::{READER, TENANT, Target, TestBench};

const CONNECTIONS: usize = 300;
/// Number of logins with a wrong password. The node delays its response to each one.
const LOGINS: usize = 40;
const CANCEL_REQUESTS: usize = 1000;

const ENDLESS: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n";

/// The code of a CancelRequest, at the position of the protocol version.
const CANCEL_CODE: u32 = 80_877_102;

#[tokio::test(flavor = "multi_thread")]
async fn floods_do_not_block_the_neighbour() {
    let mut arena = TestBench::new("flood", &[]).await;
    let mut silent = Vec::new();
    arena
        .attack("connections that send nothing", &["00000"], async |target| {
            for _ in 0..CONNECTIONS {
                silent.push(TcpStream::connect(target.address()).await.unwrap());
            }
            Response::Success
        })
        .await;
    drop(silent);
    arena
        .attack("logins with a wrong password", &["28P01", "53300"], async |target| {
            let logins = join_all((0..LOGINS).map(async |_| {
                client::config(target.address(), TENANT, READER).password("wrong").connect(NoTls).await
            }));
            refusal(logins.await.into_iter().map(Response::of))
        })
        .await;
    arena
        .attack("logins of users that do not exist", &["28P01", "28000"], async |target| {
            let logins = join_all((0..LOGINS).map(async |n| {
                client::config(target.address(), TENANT, &format!("unknown{n}")).connect(NoTls).await
            }));
            refusal(logins.await.into_iter().map(Response::of))
        })
        .await;
    arena
        .attack("cancel requests with unknown keys", &["00000"], async |target| {
            for number in 0..CANCEL_REQUESTS as u32 {
                cancel(target, number).await.unwrap();
            }
            Response::Success
        })
        .await;
    arena
        .attack("cancel requests for one statement", &["57014"], async |target| {
            let session = target.log_in(READER).await.unwrap();
            let token = session.cancel_token();
            let statement = client::answer(session.batch_execute(ENDLESS));
            tokio::pin!(statement);
            // Requests that arrive before the statement cancel nothing, so they are repeated.
            loop {
                tokio::select! {
                    answer = &mut statement => return answer,
                    _ = join_all((0..CONNECTIONS).map(|_| token.cancel_query(NoTls))) => {}
                }
            }
        })
        .await;
    arena.assert_no_failures();
}

/// Sends a cancel request with a made-up key, and waits until the node closes the connection.
async fn cancel(target: &Target, number: u32) -> std::io::Result<()> {
    let mut connection = TcpStream::connect(target.address()).await?;
    let words = [16, CANCEL_CODE, number, number.wrapping_mul(2_654_435_761)];
    connection.write_all(&words.map(u32::to_be_bytes).concat()).await?;
    connection.read_to_end(&mut Vec::new()).await.map(drop)
}

/// The first answer of logins, which all must be refused.
fn refusal(answers: impl Iterator<Item = Response>) -> Response {
    let answers: Vec<Response> = answers.collect();
    match answers.contains(&Response::Success) {
        true => Response::Wrong("a login was accepted".to_owned()),
        false => answers.into_iter().next().expect("at least one login"),
    }
}
