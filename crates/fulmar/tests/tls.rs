//! TLS connections of psql and of the command, and the reload of certificates by a running node.

mod common;

use std::path::Path;
use std::process::{Command, Output};

use common::{Node, client, fulmar, run, stderr_of_failure, stdout, with_sighup_disposition, with_timeout};
use fulmar_workload::server::certificate;
use rustix::process::{Pid, Signal, kill_process};

/// Replaces the node's certificate by a new self-signed one for `name`.
fn install(directory: &Path, name: &str) {
    let new = certificate(directory, name, &[]).unwrap();
    for (from, to) in [(new.certificate, "server.crt"), (new.key, "server.key")] {
        // Atomically: the node may check the files at any time.
        std::fs::copy(from, directory.join("new")).unwrap();
        std::fs::rename(directory.join("new"), directory.join(to)).unwrap();
    }
}

/// Returns a psql command for the node, which trusts only this certificate.
fn psql(node: &Node, trusted: &Path) -> Command {
    let port = node.sql.rsplit_once(':').unwrap().1;
    let url = format!(
        "host=localhost hostaddr=127.0.0.1 port={port} user=fulmar dbname=fulmar sslmode=verify-full sslrootcert={}",
        trusted.display()
    );
    let mut command = Command::new("psql");
    command.args(["-X", "-At", &url]).env_remove("PGPASSWORD");
    command
}

fn output(mut psql: Command) -> Output {
    psql.output()
        .unwrap_or_else(|error| panic!("psql cannot be run ({error}): apt-get install postgresql-client-15"))
}

/// Returns true if the node uses this certificate.
fn is_used(node: &Node, certificate: &Path) -> bool {
    let mut psql = psql(node, certificate);
    psql.args(["-c", "SELECT 7"]);
    String::from_utf8_lossy(&output(psql).stdout).trim() == "7"
}

/// Waits for an event of this kind with an id above `after`. Returns its id and details.
async fn wait_for(client: &tokio_postgres::Client, kind: &str, after: i64) -> (i64, String) {
    let sql = "SELECT id, coalesce(CAST(details AS TEXT), '') FROM fulmar.events WHERE kind = $1 AND id > $2 ORDER BY id LIMIT 1";
    let recorded = async {
        loop {
            if let Some(row) = client.query_opt(sql, &[&kind, &after]).await.unwrap() {
                return (row.get(0), row.get(1));
            }
        }
    };
    with_timeout(kind, recorded).await
}

#[tokio::test(flavor = "multi_thread")]
async fn sighup_reloads_valid_certificates_and_keeps_the_old_one_otherwise() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    install(directory.path(), "one");
    let (crt, key) = (file("server.crt"), file("server.key"));
    let log = file("log");
    let command = Node::command(
        &file("data"),
        &["--insecure", "--tls-cert", crt.to_str().unwrap(), "--tls-key", key.to_str().unwrap()],
    );
    // Certificates are reloaded even if the node has inherited that SIGHUP is ignored, as under
    // nohup.
    let mut command = with_sighup_disposition(true, command);
    command.stderr(std::fs::File::create(&log).unwrap());
    let node = Node::run(command);
    // This connection stays open during all reloads.
    let session = client(&node, "fulmar").await;
    let hang_up = || kill_process(Pid::from_child(&node.process), Signal::HUP).unwrap();
    assert!(is_used(&node, &file("one.crt")));

    install(directory.path(), "two");
    hang_up();
    let (reloaded, _) = wait_for(&session, "tls.reloaded", 0).await;
    assert!(is_used(&node, &file("two.crt")) && !is_used(&node, &file("one.crt")));

    // A certificate for another key, then a missing certificate.
    std::fs::copy(file("one.crt"), &crt).unwrap();
    hang_up();
    let (refused, cause) = wait_for(&session, "tls.refused", 0).await;
    assert!(refused > reloaded && cause.contains("do not match"), "{cause}");
    assert!(is_used(&node, &file("two.crt")));
    std::fs::remove_file(&crt).unwrap();
    hang_up();
    let (_, cause) = wait_for(&session, "tls.refused", refused).await;
    assert!(cause.contains("cannot read --tls-cert"), "{cause}");
    assert!(is_used(&node, &file("two.crt")));
    drop(session);
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("cannot reload the TLS certificate"), "{log}");
}

#[test]
fn psql_connects_over_tls_with_a_password() {
    let directory = tempfile::tempdir().unwrap();
    let node_certificate = certificate(directory.path(), "node", &[]).unwrap();
    let crt = node_certificate.certificate.to_str().unwrap();
    let key = node_certificate.key.to_str().unwrap();
    let data = directory.path().join("data");
    let node = Node::start(&data, &["--tls-cert", crt, "--tls-key", key]);
    let password = std::fs::read_to_string(data.join("superuser-password")).unwrap();
    let mut query = psql(&node, &node_certificate.certificate);
    // 3 MB, so that the result spans several TLS records.
    query
        .args(["-c", "SELECT printf('%3000000d', 7)", "-c", "\\conninfo"])
        .env("PGPASSWORD", password.trim());
    let result = stdout(&output(query));
    assert!(result.starts_with("      ") && result.contains(" 7\n") && result.len() > 3_000_000);
    assert!(result.contains("SSL connection (protocol: TLSv1.3"), "{}", &result[3_000_000..]);
    let mut wrong_password = psql(&node, &node_certificate.certificate);
    wrong_password.args(["-c", "SELECT 1"]).env("PGPASSWORD", "wrong");
    let error = String::from_utf8(output(wrong_password).stderr).unwrap();
    assert!(error.contains("password authentication failed for user \"fulmar\""), "{error}");
}

/// The command accepts psql's TLS parameters in its URL.
#[test]
fn command_supports_the_sslmodes_of_psql() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    // A CA certificate, a certificate issued by it, and a self-signed certificate marked as a CA's.
    certificate(directory.path(), "ca", &[]).unwrap();
    certificate(directory.path(), "itself", &[]).unwrap();
    let by_ca = ["-CA", "ca.crt", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE"];
    certificate(directory.path(), "signed", &by_ca).unwrap();

    for (shown, trusted, other) in [("signed", "ca", "itself"), ("itself", "itself", "ca")] {
        let (crt, key) = (file(&format!("{shown}.crt")), file(&format!("{shown}.key")));
        let node = Node::start(
            &directory.path().join(shown),
            &["--insecure", "--tls-cert", &crt, "--tls-key", &key],
        );
        let port = node.sql.rsplit_once(':').unwrap().1;
        let list = |host: &str, query: &str| {
            run(&["tenant", "list", "--server", &format!("postgres://fulmar@{host}:{port}?{query}")])
        };
        stdout(&list("localhost", "sslmode=require"));
        for mode in ["sslmode=verify-full&", "sslmode=verify-ca&", "sslmode=require&", ""] {
            stdout(&list("localhost", &format!("{mode}sslrootcert={}", file(&format!("{trusted}.crt")))));
            let untrusted =
                list("localhost", &format!("{mode}sslrootcert={}", file(&format!("{other}.crt"))));
            let error = stderr_of_failure(&untrusted, 1);
            assert!(error.contains("cannot verify the node's certificate"), "{error}");
        }
        let ca = file(&format!("{trusted}.crt"));
        stdout(&list("127.0.0.1", &format!("sslmode=verify-ca&sslrootcert={ca}")));
        let other_host =
            stderr_of_failure(&list("127.0.0.1", &format!("sslmode=verify-full&sslrootcert={ca}")), 1);
        assert!(other_host.contains("not valid for name"), "{other_host}");
    }

    let plain = Node::start(&directory.path().join("plain"), &["--insecure"]);
    stdout(&run(&["tenant", "list", "--server", &format!("{}?sslmode=prefer", plain.url())]));
    let error = stderr_of_failure(
        &run(&["tenant", "list", "--server", &format!("{}?sslmode=require", plain.url())]),
        1,
    );
    assert!(error.contains("the node does not support TLS"), "{error}");
}

/// Without certificates a node does not handle SIGHUP: the signal ends the process, unless it has
/// inherited that the signal is ignored.
#[test]
fn sighup_without_certificates_has_its_inherited_effect() {
    let directory = tempfile::tempdir().unwrap();
    let start = |ignored| {
        Node::run(with_sighup_disposition(ignored, Node::command(directory.path(), &["--insecure"])))
    };
    assert_eq!(start(false).stop_with(Signal::HUP), None);
    let node = start(true);
    kill_process(Pid::from_child(&node.process), Signal::HUP).unwrap();
    stdout(&run(&["tenant", "list", "--server", &node.url()]));
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
    stdout(&fulmar(&["verify", "--data", directory.path().to_str().unwrap()]).output().unwrap());
}
