//! Conformance of each kind of store.

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
    // Neighbouring prefixes that are prefixes of this one, or start with it.
    for neighbour in ["", "a", "a/bc"] {
        store(neighbour).put("read/a", Bytes::from_static(b"another's")).await.unwrap();
    }
    conforms(Arc::new(store("a/b"))).await;
    assert_eq!(store("a/bc").get("read/a", Span::Whole).await.unwrap().bytes, "another's");
}

/// Wrappers without faults must not change the behaviour of a store.
#[tokio::test(flavor = "multi_thread")]
async fn wrappers_are_transparent() {
    conforms(Arc::new(FaultyStore::new(Arc::new(Backend::memory())))).await;
    conforms(Arc::new(Reliable::new(Arc::new(Backend::memory()), Limits::default()))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn permanent_s3_errors_are_not_retried() {
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
    // No process listens on port 1.
    let unreachable =
        Backend::s3(server.bucket(), "", set("AWS_ENDPOINT_URL", "http://127.0.0.1:1")).unwrap();
    let get = unreachable.get("a", Span::Whole).await.unwrap_err();
    assert_eq!(get.kind(), FailureKind::Unavailable, "{get}");
}

/// TLS: a server whose certificate is not trusted is rejected, and a trusted one is accepted.
/// Trusted certificates are taken from the environment, so the test runs itself again in a process
/// with its own environment.
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
    let untrusting = Backend::s3(server.bucket(), "", server.environment()).unwrap();
    let refused = untrusting.get("a", Span::Whole).await.unwrap_err();
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

/// Tests a store outside of this machine: `FULMAR_TEST_STORE=s3://bucket/empty-prefix AWS_...=...
/// cargo test -p fulmar-store --test conformance -- --ignored`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs FULMAR_TEST_STORE"]
async fn external_store() {
    let url =
        std::env::var("FULMAR_TEST_STORE").expect("FULMAR_TEST_STORE must be the URL of an empty store");
    conforms(Arc::new(url.parse::<fulmar_store::StoreUrl>().unwrap().open().unwrap())).await;
}
