//! Connections between nodes over TLS, on loopback: mutual authentication, and the errors that a
//! wrong certificate or a wrong configuration causes on both sides.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use fulmar_certificates::{Authority, Issued, Reload};
use fulmar_transport::tls::{NodeStream, NodeTls, NodeTlsFiles};
use fulmar_transport::{Error, Identity};
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsStream;

const DAY: Duration = Duration::from_hours(24);
/// Longer than any step takes.
const DEADLINE: Duration = Duration::from_secs(60);

/// An authority, and a directory with its certificate and those that it has issued.
struct Cluster {
    directory: TempDir,
    issued: Issued,
}

impl Cluster {
    fn new() -> Self {
        let (directory, issued) = (tempfile::tempdir().unwrap(), Authority::create(20 * DAY).unwrap());
        std::fs::write(directory.path().join("ca.crt"), &issued.certificate_pem).unwrap();
        Cluster { directory, issued }
    }

    fn path(&self, file: &str) -> PathBuf {
        self.directory.path().join(file)
    }

    /// Issues a certificate as `fulmar cert node` does.
    fn issue(&self, name: &str, lifetime: Duration) -> Issued {
        let authority = Authority::from_pem(&self.issued.certificate_pem, &self.issued.key_pem).unwrap();
        authority.issue(name, &[], lifetime).unwrap()
    }

    /// Issues a certificate that ends at `end`, for this usage, which `fulmar cert node` never does.
    fn issue_unusual(&self, name: &str, end: SystemTime, usage: &[ExtendedKeyUsagePurpose]) -> Issued {
        let key = KeyPair::from_pem(&self.issued.key_pem).unwrap();
        let issuer = Issuer::from_ca_cert_pem(&self.issued.certificate_pem, key).unwrap();
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.not_after = end.into();
        params.extended_key_usages = usage.to_vec();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap();
        Issued { certificate_pem: certificate.pem(), key_pem: key.serialize_pem() }
    }

    fn files(&self, name: &str) -> NodeTlsFiles {
        NodeTlsFiles {
            ca: self.path("ca.crt"),
            certificate: self.path(&format!("{name}.crt")),
            key: self.path(&format!("{name}.key")),
        }
    }

    fn write(&self, name: &str, issued: &Issued) {
        std::fs::write(self.path(&format!("{name}.crt")), &issued.certificate_pem).unwrap();
        std::fs::write(self.path(&format!("{name}.key")), &issued.key_pem).unwrap();
    }

    fn node(&self, name: &str) -> std::sync::Arc<NodeTls> {
        self.write(name, &self.issue(name, DAY));
        NodeTls::load(self.files(name), name).unwrap()
    }

    /// Returns the error of a node that starts with this certificate.
    fn refused(&self, issued: &Issued) -> String {
        self.write("refused", issued);
        NodeTls::load(self.files("refused"), "a").unwrap_err().to_string()
    }
}

async fn in_time<T>(step: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, step).await.expect("a connection made no progress")
}

/// A TCP connection: the dialed and the accepted end.
async fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (dialed, accepted) =
        tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
    (dialed.unwrap(), accepted.unwrap().0)
}

type Outcome = Result<TlsStream<TcpStream>, Error>;

/// `dialing` connects to `accepting`, which it expects to be the node `name`.
async fn connect(dialing: &NodeTls, accepting: &NodeTls, name: &str) -> (Outcome, Outcome) {
    let (dialed, accepted) = tcp().await;
    // Each side drops its end when it fails, as a node does.
    in_time(async { tokio::join!(dialing.connect(dialed, name), accepting.accept(accepted)) }).await
}

#[track_caller]
fn assert_refused(outcome: Outcome, texts: &[&str]) {
    match outcome {
        Err(Error::Refused(reason)) => {
            for text in texts {
                assert!(reason.contains(text), "\"{text}\" is missing in: {reason}");
            }
        }
        Err(error) => panic!("unclear error: {error}"),
        Ok(_) => panic!("the connection was accepted, instead of: {texts:?}"),
    }
}

fn identity(node: u32) -> Identity {
    Identity { cluster: 1, node, incarnation: 1, versions: 1..=1 }
}

/// A node's certificates with those of another one in some places: what a node without the checks
/// at its start would present.
fn rustls_client(ca: &Path, issued: Option<&Issued>) -> tokio_rustls::TlsConnector {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca).unwrap()).unwrap();
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match issued {
        Some(issued) => builder
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_slice(issued.certificate_pem.as_bytes()).unwrap()],
                PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes()).unwrap(),
            )
            .unwrap(),
        None => builder.with_no_client_auth(),
    };
    std::sync::Arc::new(config).into()
}

/// The error with which `node` refuses a client that presents `issued`.
async fn refusal_of_client(cluster: &Cluster, node: &NodeTls, issued: Option<&Issued>) -> Outcome {
    let (dialed, accepted) = tcp().await;
    let client = async {
        let connector = rustls_client(&cluster.path("ca.crt"), issued);
        let mut stream = connector.connect("b".try_into().unwrap(), dialed).await.unwrap();
        let confirmed = stream.read_u8().await;
        confirmed.expect_err("a client without a valid certificate must not be confirmed");
    };
    in_time(async { tokio::join!(node.accept(accepted), client).0 }).await
}

/// Sends a message in each direction, through the streams of a connection.
async fn call(dialed: NodeStream, accepted: NodeStream) {
    let (reader, writer) = tokio::io::split(dialed);
    let (far_reader, far_writer) = tokio::io::split(accepted);
    let (first, second) = (identity(1), identity(2));
    let (dialed, accepted) = tokio::join!(
        fulmar_transport::connect(reader, writer, &first, Some(2)),
        fulmar_transport::accept(far_reader, far_writer, &second)
    );
    let ((connection, driver), (mut incoming, far_driver)) = (dialed.unwrap(), accepted.unwrap());
    tokio::spawn(driver.run());
    tokio::spawn(far_driver.run());
    let answering = async {
        let mut stream = incoming.accept().await.unwrap();
        let request = stream.receive().await.unwrap().unwrap();
        stream.send(&request).await.unwrap();
        stream.finish();
    };
    // Several TLS records.
    let request = vec![7; 300_000];
    let (answer, ()) = tokio::join!(connection.call(&request), answering);
    assert_eq!(answer.unwrap(), request);
}

#[tokio::test]
async fn nodes_of_one_authority_connect() {
    let cluster = Cluster::new();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let (dialed, accepted) = tcp().await;
    let streams = async {
        tokio::join!(NodeStream::connect(dialed, Some(&a), "b"), NodeStream::accept(accepted, Some(&b)))
    };
    let (dialed, accepted) = in_time(streams).await;
    let (dialed, accepted) = (dialed.unwrap(), accepted.unwrap());
    accepted.peer().check_name("a").unwrap();
    dialed.peer().check_name("b").unwrap();
    let error = accepted.peer().check_name("b").unwrap_err().to_string();
    assert!(error.contains("the dialing node is not node \"b\"") && error.contains("for \"a\""), "{error}");
    in_time(call(dialed, accepted)).await;
}

#[tokio::test]
async fn nodes_without_certificates_connect_without_tls() {
    let (dialed, accepted) = tcp().await;
    let (dialed, accepted) =
        tokio::join!(NodeStream::connect(dialed, None, "b"), NodeStream::accept(accepted, None));
    let (dialed, accepted) = (dialed.unwrap(), accepted.unwrap());
    accepted.peer().check_name("any").unwrap();
    in_time(call(dialed, accepted)).await;
}

#[tokio::test]
async fn other_authority_is_refused_on_both_sides() {
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let (a, b) = (other.node("a"), cluster.node("b"));
    let (dialed, accepted) = connect(&a, &b, "b").await;
    assert_refused(dialed, &["node \"b\" was rejected", "another authority", "fulmar cert node"]);
    assert_refused(
        accepted,
        &["the dialing node rejected the certificate of this node", "another authority"],
    );

    // The dialing node trusts both authorities, the accepting one only its own.
    let both = format!("{}{}", cluster.issued.certificate_pem, other.issued.certificate_pem);
    std::fs::write(other.path("ca.crt"), both).unwrap();
    a.reload().unwrap();
    let (dialed, accepted) = connect(&a, &b, "b").await;
    assert_refused(dialed, &["node \"b\" rejected the certificate of this node", "the peer's --rpc-ca"]);
    assert_refused(accepted, &["the dialing node was rejected", "another authority"]);
}

#[tokio::test]
async fn other_node_than_the_expected_one_is_refused() {
    let cluster = Cluster::new();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let (dialed, accepted) = connect(&a, &b, "c").await;
    assert_refused(dialed, &["node \"c\" was rejected", "valid for \"b\", not for \"c\""]);
    assert_refused(accepted, &["the name of this node that the peer expects"]);
    let (dialed, _) = connect(&a, &b, "no name").await;
    assert_refused(dialed, &["not a DNS name"]);
}

#[tokio::test]
async fn clients_without_a_valid_certificate_are_refused() {
    let cluster = Cluster::new();
    let b = cluster.node("b");
    let refused = refusal_of_client(&cluster, &b, None).await;
    assert_refused(refused, &["the dialing node was rejected: it has no certificate", "--rpc-ca"]);
    let both = [ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
    let expired = cluster.issue_unusual("a", SystemTime::now() - 3 * DAY, &both);
    let refused = refusal_of_client(&cluster, &b, Some(&expired)).await;
    assert_refused(refused, &["expired 3 d ago", "fulmar cert node"]);
    let server = cluster.issue_unusual("a", SystemTime::now() + DAY, &both[1..]);
    let refused = refusal_of_client(&cluster, &b, Some(&server)).await;
    assert_refused(refused, &["cannot be used as a client certificate", "clientAuth"]);
    let usable = cluster.issue_unusual("a", SystemTime::now() + DAY, &both);
    let (dialed, accepted) = tcp().await;
    let connector = rustls_client(&cluster.path("ca.crt"), Some(&usable));
    let (dialed, accepted) = in_time(async {
        tokio::join!(connector.connect("b".try_into().unwrap(), dialed), b.accept(accepted))
    })
    .await;
    assert!(dialed.is_ok() && accepted.is_ok(), "the other refusals have another reason");
}

#[tokio::test]
async fn node_does_not_start_with_a_certificate_that_others_reject() {
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let both = [ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
    let tomorrow = SystemTime::now() + DAY;
    for (issued, text) in [
        (cluster.issue_unusual("a", SystemTime::now() - 3 * DAY, &both), "expired 3 d ago"),
        (cluster.issue_unusual("a", tomorrow, &both[..1]), "cannot be used as a server certificate"),
        (cluster.issue_unusual("a", tomorrow, &both[1..]), "cannot be used as a client certificate"),
        (cluster.issue("b", DAY), "is valid for \"b\", not for \"a\""),
        (other.issue("a", DAY), "another authority"),
    ] {
        let error = cluster.refused(&issued);
        assert!(error.contains("--rpc-cert") && error.contains(text), "{error}");
    }
    let mixed = Issued { key_pem: cluster.issue("a", DAY).key_pem, ..cluster.issue("a", DAY) };
    assert!(cluster.refused(&mixed).contains("--rpc-cert and --rpc-key do not match"));
    std::fs::write(cluster.path("ca.crt"), "").unwrap();
    assert!(cluster.refused(&mixed).contains("--rpc-ca"));
}

#[tokio::test]
async fn reload_uses_valid_files_and_keeps_the_old_ones_otherwise() {
    let cluster = Cluster::new();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    assert!(a.warning().unwrap().contains("expires within 14 days"));
    assert!(!a.files().changed());
    cluster.write("a", &cluster.issue("a", 15 * DAY));
    assert!(a.files().changed());
    a.reload().unwrap();
    assert_eq!(a.warning(), None);
    std::fs::write(cluster.path("a.key"), "").unwrap();
    assert!(a.files().changed());
    assert!(a.reload().unwrap_err().to_string().contains("--rpc-key"));
    let (dialed, accepted) = connect(&a, &b, "b").await;
    assert!(dialed.is_ok() && accepted.is_ok(), "the old certificate must stay in use");
}

#[tokio::test]
async fn plain_connection_to_a_node_with_tls_is_refused_on_both_sides() {
    let cluster = Cluster::new();
    let b = cluster.node("b");
    let (dialed, accepted) = tcp().await;
    let (reader, writer) = dialed.into_split();
    let own = identity(1);
    let (dialed, accepted) = in_time(async {
        tokio::join!(fulmar_transport::connect(reader, writer, &own, Some(2)), b.accept(accepted))
    })
    .await;
    let error = dialed.err().expect("the node must reject it");
    assert!(matches!(&error, Error::Refused(reason) if reason.contains("the node uses TLS")), "{error}");
    assert_refused(accepted, &["the dialing node does not use TLS", "all without them"]);
}

#[tokio::test]
async fn tls_connection_to_a_node_without_tls_is_refused_on_both_sides() {
    let cluster = Cluster::new();
    let a = cluster.node("a");
    let (dialed, accepted) = tcp().await;
    let own = identity(2);
    let (dialed, accepted) = in_time(async {
        tokio::join!(a.connect(dialed, "b"), async {
            let (reader, writer) = accepted.into_split();
            fulmar_transport::accept(reader, writer, &own).await
        })
    })
    .await;
    assert_refused(dialed, &["node \"b\" does not use TLS", "all without them"]);
    let error = accepted.err().expect("it must be rejected");
    assert!(
        matches!(&error, Error::Refused(reason) if reason.contains("the dialing node uses TLS")),
        "{error}"
    );

    // A server that closes the connection.
    let (dialed, mut accepted) = tcp().await;
    let (dialed, ()) = in_time(async {
        tokio::join!(a.connect(dialed, "b"), async {
            accepted.shutdown().await.unwrap();
            let _ = accepted.read_to_end(&mut Vec::new()).await;
        })
    })
    .await;
    assert_refused(dialed, &["closed the connection during the TLS handshake"]);
}
