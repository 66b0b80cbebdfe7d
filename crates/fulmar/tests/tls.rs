//! TLS with a node: psql, the command, and certificates that are renewed while it runs.

mod common;

use std::path::Path;
use std::process::{Command, Output};

use common::{Node, client, fulmar, refusal, run, stdout, with_hangups, within};
use fulmar_workload::server::certificate;
use rustix::process::{Pid, Signal, kill_process};

/// A certificate of `name` that signs itself, in the place of the one that the node shows.
fn install(directory: &Path, name: &str) {
    let made = certificate(directory, name, &[]).unwrap();
    for (from, to) in [(made.certificate, "server.crt"), (made.key, "server.key")] {
        // At once: the node may look at any time.
        std::fs::copy(from, directory.join("new")).unwrap();
        std::fs::rename(directory.join("new"), directory.join(to)).unwrap();
    }
}

/// psql's command line for the node, which trusts this certificate only.
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

/// Whether psql trusts the node if it knows this certificate.
fn is_shown(node: &Node, certificate: &Path) -> bool {
    let mut psql = psql(node, certificate);
    psql.args(["-c", "SELECT 7"]);
    String::from_utf8_lossy(&output(psql).stdout).trim() == "7"
}

/// Waits for an event after this one. Returns its number and its details.
async fn wait_for(asks: &tokio_postgres::Client, kind: &str, after: i64) -> (i64, String) {
    let sql = "SELECT id, coalesce(CAST(details AS TEXT), '') FROM fulmar.events WHERE kind = $1 AND id > $2 ORDER BY id LIMIT 1";
    let recorded = async {
        loop {
            if let Some(row) = asks.query_opt(sql, &[&kind, &after]).await.unwrap() {
                return (row.get(0), row.get(1));
            }
        }
    };
    within(kind, recorded).await
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_reloaded_on_sighup_unless_they_are_bad() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    install(directory.path(), "one");
    let (crt, key) = (file("server.crt"), file("server.key"));
    let log = file("log");
    let command = Node::command(
        &file("data"),
        &["--insecure", "--tls-cert", crt.to_str().unwrap(), "--tls-key", key.to_str().unwrap()],
    );
    // As under nohup: certificates are reloaded nevertheless.
    let mut command = with_hangups(true, command);
    command.stderr(std::fs::File::create(&log).unwrap());
    let node = Node::run(command);
    // It stays connected all the time.
    let asks = client(&node, "fulmar").await;
    let hang_up = || kill_process(Pid::from_child(&node.process), Signal::HUP).unwrap();
    assert!(is_shown(&node, &file("one.crt")));

    install(directory.path(), "two");
    hang_up();
    let (reloaded, _) = wait_for(&asks, "tls.reloaded", 0).await;
    assert!(is_shown(&node, &file("two.crt")) && !is_shown(&node, &file("one.crt")));

    // The certificate of another key, and what is no certificate.
    std::fs::copy(file("one.crt"), &crt).unwrap();
    hang_up();
    let (refused, cause) = wait_for(&asks, "tls.refused", 0).await;
    assert!(refused > reloaded && cause.contains("do not go together"), "{cause}");
    assert!(is_shown(&node, &file("two.crt")));
    std::fs::remove_file(&crt).unwrap();
    hang_up();
    let (_, cause) = wait_for(&asks, "tls.refused", refused).await;
    assert!(cause.contains("cannot read --tls-cert"), "{cause}");
    assert!(is_shown(&node, &file("two.crt")));
    drop(asks);
    assert_eq!(node.end(Signal::TERM), Some(0));
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("the new certificate cannot be used"), "{log}");
}

#[test]
fn psql_connects_over_tls_with_a_password() {
    let directory = tempfile::tempdir().unwrap();
    let made = certificate(directory.path(), "node", &[]).unwrap();
    let (crt, key) = (made.certificate.to_str().unwrap(), made.key.to_str().unwrap());
    let data = directory.path().join("data");
    let node = Node::start(&data, &["--tls-cert", crt, "--tls-key", key]);
    let password = std::fs::read_to_string(data.join("superuser-password")).unwrap();
    let mut asks = psql(&node, &made.certificate);
    // 3 MB, so that TLS has more than one record to cut it into.
    asks.args(["-c", "SELECT printf('%3000000d', 7)", "-c", "\\conninfo"]).env("PGPASSWORD", password.trim());
    let answer = stdout(&output(asks));
    assert!(answer.starts_with("      ") && answer.contains(" 7\n") && answer.len() > 3_000_000);
    assert!(answer.contains("SSL connection (protocol: TLSv1.3"), "{}", &answer[3_000_000..]);
    let mut guesses = psql(&node, &made.certificate);
    guesses.args(["-c", "SELECT 1"]).env("PGPASSWORD", "wrong");
    let refused = String::from_utf8(output(guesses).stderr).unwrap();
    assert!(refused.contains("password authentication failed for user \"fulmar\""), "{refused}");
}

/// The command takes the address that psql takes.
#[test]
fn the_command_speaks_tls_as_psql_does() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    // An authority, a certificate that it signs, and one that signs itself, as an authority does.
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
            let strange = list("localhost", &format!("{mode}sslrootcert={}", file(&format!("{other}.crt"))));
            let strange = refusal(&strange, 1);
            assert!(strange.contains("cannot trust the node's certificate"), "{strange}");
        }
        let ca = file(&format!("{trusted}.crt"));
        stdout(&list("127.0.0.1", &format!("sslmode=verify-ca&sslrootcert={ca}")));
        let elsewhere = refusal(&list("127.0.0.1", &format!("sslmode=verify-full&sslrootcert={ca}")), 1);
        assert!(elsewhere.contains("not valid for name"), "{elsewhere}");
    }

    let plain = Node::start(&directory.path().join("plain"), &["--insecure"]);
    stdout(&run(&["tenant", "list", "--server", &format!("{}?sslmode=prefer", plain.url())]));
    let refused =
        refusal(&run(&["tenant", "list", "--server", &format!("{}?sslmode=require", plain.url())]), 1);
    assert!(refused.contains("the node speaks no TLS"), "{refused}");
}

/// Without certificates there is nothing to reload, and a node reacts to SIGHUP as any process: it ends, unless it has inherited that the
/// signal is ignored.
#[test]
fn sighup_without_certificates_has_its_inherited_effect() {
    let directory = tempfile::tempdir().unwrap();
    let start = |ignored| Node::run(with_hangups(ignored, Node::command(directory.path(), &["--insecure"])));
    assert_eq!(start(false).end(Signal::HUP), None);
    let node = start(true);
    kill_process(Pid::from_child(&node.process), Signal::HUP).unwrap();
    stdout(&run(&["tenant", "list", "--server", &node.url()]));
    assert_eq!(node.end(Signal::TERM), Some(0));
    stdout(&fulmar(&["verify", "--data", directory.path().to_str().unwrap()]).output().unwrap());
}
