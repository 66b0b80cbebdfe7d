//! The stores that there are.

use std::process::Command;
use std::sync::Arc;

use bytes::Bytes;
use fulmar_store::{Backend, FailureKind, FaultyStore, Limits, Reliable, Span, Store};
use fulmar_workload::server::S3Server;

use crate::checks::conforms;

#[tokio::test(flavor = "multi_thread")]
async fn memory() {
    conforms(Arc::new(Backend::memory())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory() {
    let directory = tempfile::tempdir().unwrap();
    conforms(Arc::new(Backend::directory(directory.path()).unwrap())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_s3_server() {
    let server = S3Server::start().unwrap();
    let store = |prefix| Backend::s3(server.bucket(), prefix, server.environment()).unwrap();
    // Its neighbours' prefixes begin as its own does.
    for neighbour in ["", "a", "a/bc"] {
        store(neighbour).put("read/a", Bytes::from_static(b"another's")).await.unwrap();
    }
    conforms(Arc::new(store("a/b"))).await;
    assert_eq!(store("a/bc").get("read/a", Span::Whole).await.unwrap().bytes, "another's");
}

/// A wrapper without faults is not noticed, nor is one that mends them.
#[tokio::test(flavor = "multi_thread")]
async fn wrappers_that_have_nothing_to_do() {
    conforms(Arc::new(FaultyStore::new(Arc::new(Backend::memory())))).await;
    conforms(Arc::new(Reliable::new(Arc::new(Backend::memory()), Limits::default()))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_s3_server_refuses_is_not_asked_again() {
    let server = S3Server::start().unwrap();
    let set = |name: &str, value: &str| {
        let mut environment = server.environment();
        environment.push((name.to_owned(), value.to_owned()));
        environment
    };
    let wrong_secret = Backend::s3(server.bucket(), "", set("AWS_SECRET_ACCESS_KEY", "another")).unwrap();
    let no_bucket = Backend::s3("nowhere", "", server.environment()).unwrap();
    for store in [&wrong_secret, &no_bucket] {
        let put = store.put("a", Bytes::from_static(b"x")).await.unwrap_err();
        assert_eq!(put.kind(), FailureKind::Refused, "{put}");
        let list = store.list("a", None).await.unwrap_err();
        assert_eq!(list.kind(), FailureKind::Refused, "{list}");
    }
    // Nobody listens on port 1.
    let nobody = Backend::s3(server.bucket(), "", set("AWS_ENDPOINT_URL", "http://127.0.0.1:1")).unwrap();
    let get = nobody.get("a", Span::Whole).await.unwrap_err();
    assert_eq!(get.kind(), FailureKind::Unavailable, "{get}");
}

/// The client's TLS: a server whose certificate nobody has signed whom it trusts is refused, and one that it trusts is
/// spoken to. What it trusts comes from the environment, which only a process of its own can have for itself: this
/// test, run again by itself.
#[tokio::test(flavor = "multi_thread")]
async fn an_s3_server_with_tls() {
    const ENVIRONMENT: &str = "FULMAR_TEST_TLS_ENDPOINT";
    if let Ok(endpoint) = std::env::var(ENVIRONMENT) {
        let store =
            Backend::s3("fulmar", "", std::env::vars().chain([("AWS_ENDPOINT_URL".into(), endpoint)]))
                .unwrap();
        store.put("a", Bytes::from_static(b"x")).await.unwrap();
        assert_eq!(store.get("a", Span::Whole).await.unwrap().bytes, "x");
        return;
    }
    let server = S3Server::start_with_tls().unwrap();
    let stranger = Backend::s3(server.bucket(), "", server.environment()).unwrap();
    let refused = stranger.get("a", Span::Whole).await.unwrap_err();
    assert!(refused.to_string().contains("certificate"), "{refused}");

    let endpoint = server.environment().into_iter().find(|(name, _)| name == "AWS_ENDPOINT_URL").unwrap().1;
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "stores::an_s3_server_with_tls"])
        .envs(server.environment())
        .env(ENVIRONMENT, endpoint)
        .env("SSL_CERT_FILE", server.certificate().unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// For servers that are not here: `FULMAR_TEST_STORE=s3://bucket/empty-prefix AWS_...=... cargo test -p fulmar-store --test
/// conformance -- --ignored`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a store of yours"]
async fn the_store_of_the_environment() {
    let url = std::env::var("FULMAR_TEST_STORE").expect("FULMAR_TEST_STORE names an empty store");
    conforms(Arc::new(url.parse::<fulmar_store::StoreUrl>().unwrap().open().unwrap())).await;
}
