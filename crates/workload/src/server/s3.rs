//! Runs an S3 server on a temporary directory: versitygw, which `make tools` builds.

use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tempfile::TempDir;

use super::POLL_INTERVAL;
use super::ports::ReservedPort;
use super::slow_puts::SlowPuts;
use super::{Certificate, certificate};

/// Where `make tools` installs versitygw.
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/tools/versitygw");

const BUCKET: &str = "fulmar";
const ACCESS_KEY: &str = "fulmar";
const SECRET_KEY: &str = "not-a-secret";

const START_TIMEOUT: Duration = Duration::from_secs(120);

/// A running S3 server with one empty bucket. Dropping it ends the server and removes its data.
pub struct S3Server {
    child: Child,
    endpoint: String,
    tls: Option<Certificate>,
    // Dropped last, after the process has ended.
    directory: TempDir,
    _port: ReservedPort,
    /// The proxy that delays requests.
    proxy: Option<SlowPuts>,
}

impl S3Server {
    /// Starts the versitygw that `make tools` has built.
    pub fn start() -> anyhow::Result<S3Server> {
        Self::start_program(Path::new(PROGRAM), Ipv4Addr::LOCALHOST, false)
    }

    /// Like [`S3Server::start`], on this address.
    pub fn start_on(host: Ipv4Addr) -> anyhow::Result<S3Server> {
        Self::start_program(Path::new(PROGRAM), host, false)
    }

    /// Delays each PUT by a random time in `delay`, for clients that use [`S3Server::environment`]
    /// from now on.
    pub fn delay_puts(&mut self, host: Ipv4Addr, delay: RangeInclusive<Duration>) -> anyhow::Result<()> {
        let server = self.endpoint.strip_prefix("http://").context("the S3 server uses TLS")?;
        let proxy = SlowPuts::start(host, server.to_owned(), delay)?;
        self.endpoint = format!("http://{}", proxy.address());
        self.proxy = Some(proxy);
        Ok(())
    }

    /// Starts the versitygw at `program`.
    pub fn start_at(program: &Path) -> anyhow::Result<S3Server> {
        Self::start_program(program, Ipv4Addr::LOCALHOST, false)
    }

    /// Like [`S3Server::start`], with TLS and a self-signed certificate: [`S3Server::certificate`].
    pub fn start_with_tls() -> anyhow::Result<S3Server> {
        Self::start_program(Path::new(PROGRAM), Ipv4Addr::LOCALHOST, true)
    }

    fn start_program(program: &Path, host: Ipv4Addr, with_tls: bool) -> anyhow::Result<S3Server> {
        ensure!(program.exists(), "there is no S3 server at {}; run `make tools`", program.display());
        let directory = tempfile::Builder::new()
            .prefix("fulmar-s3-")
            .tempdir()
            .context("could not create a temporary directory")?;
        // versitygw treats each directory below its root as a bucket.
        let root = directory.path().join("root");
        std::fs::create_dir_all(root.join(BUCKET))?;
        let reserved_port = ReservedPort::reserve_free()?;
        let port = reserved_port.number();
        let mut command = Command::new(program);
        command.args(["--quiet", "--port", &format!("{host}:{port}")]);
        // Not a CA certificate, so that clients must trust it as a server certificate.
        let no_authority = ["-addext", "basicConstraints=critical,CA:FALSE"];
        let tls = with_tls.then(|| certificate(directory.path(), "server", &no_authority)).transpose()?;
        if let Some(Certificate { certificate, key }) = &tls {
            command.arg("--cert").arg(certificate).arg("--key").arg(key);
        }
        command.arg("posix").arg(&root);
        command.env("ROOT_ACCESS_KEY", ACCESS_KEY).env("ROOT_SECRET_KEY", SECRET_KEY);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().with_context(|| format!("could not run {command:?}"))?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        // The certificate is for a host name, not for an address.
        let name = if host == Ipv4Addr::LOCALHOST { "localhost".to_owned() } else { host.to_string() };
        let endpoint = format!("{scheme}://{name}:{port}");
        let mut server = S3Server { child, endpoint, tls, directory, _port: reserved_port, proxy: None };
        server.wait_for(host, port)?;
        Ok(server)
    }

    fn wait_for(&mut self, host: Ipv4Addr, port: u16) -> anyhow::Result<()> {
        let begin = Instant::now();
        while std::net::TcpStream::connect((host, port)).is_err() {
            ensure!(self.child.try_wait()?.is_none(), "the S3 server exited before it answered");
            ensure!(begin.elapsed() < START_TIMEOUT, "the S3 server did not answer within {START_TIMEOUT:?}");
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// The URL of a store with this prefix in the bucket.
    pub fn url(&self, prefix: &str) -> String {
        format!("s3://{BUCKET}/{prefix}")
    }

    /// The certificate that clients must trust, if the server uses TLS.
    pub fn certificate(&self) -> Option<&Path> {
        self.tls.as_ref().map(|tls| tls.certificate.as_path())
    }

    /// The name of the bucket.
    pub fn bucket(&self) -> &'static str {
        BUCKET
    }

    /// The environment variables with a client's credentials and endpoint.
    pub fn environment(&self) -> Vec<(String, String)> {
        [
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ENDPOINT_URL", &self.endpoint),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
    }

    /// The directory of the bucket, in which each object is a file with its name.
    pub fn objects(&self) -> PathBuf {
        self.directory.path().join("root").join(BUCKET)
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        // The server may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
