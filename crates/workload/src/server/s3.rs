//! An S3 server on a temporary directory: versitygw, which `make test` builds.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tempfile::TempDir;

use super::POLL;
use super::ports::Port;
use super::{Certificate, certificate};

/// Where `make` puts it.
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/tools/versitygw");

const BUCKET: &str = "fulmar";
const ACCESS_KEY: &str = "fulmar";
const SECRET_KEY: &str = "not-a-secret";

const START_TIMEOUT: Duration = Duration::from_secs(120);

/// An S3 server that runs, with one empty bucket. It ends when this is dropped, and its data with it.
pub struct S3Server {
    child: Child,
    endpoint: String,
    tls: Option<Certificate>,
    // Dropped last: the process is gone by then.
    directory: TempDir,
    _port: Port,
}

impl S3Server {
    /// Starts the server that `make` has built.
    pub fn start() -> anyhow::Result<S3Server> {
        Self::start_program(Path::new(PROGRAM), false)
    }

    /// Starts another versitygw.
    pub fn start_at(program: &Path) -> anyhow::Result<S3Server> {
        Self::start_program(program, false)
    }

    /// The same, speaking TLS with a certificate that signs itself: [`S3Server::certificate`].
    pub fn start_with_tls() -> anyhow::Result<S3Server> {
        Self::start_program(Path::new(PROGRAM), true)
    }

    fn start_program(program: &Path, speaks_tls: bool) -> anyhow::Result<S3Server> {
        ensure!(program.exists(), "there is no S3 server at {}; run `make tools`", program.display());
        let directory =
            tempfile::Builder::new().prefix("fulmar-s3-").tempdir().context("no temporary directory")?;
        // A bucket is a directory of the server's.
        let root = directory.path().join("root");
        std::fs::create_dir_all(root.join(BUCKET))?;
        let taken = Port::free()?;
        let port = taken.number();
        let mut command = Command::new(program);
        command.args(["--quiet", "--port", &format!("127.0.0.1:{port}")]);
        // Nobody is to take it for an authority: a client that trusts it must take it as a server's.
        let no_authority = ["-addext", "basicConstraints=critical,CA:FALSE"];
        let tls = speaks_tls.then(|| certificate(directory.path(), "server", &no_authority)).transpose()?;
        if let Some(Certificate { certificate, key }) = &tls {
            command.arg("--cert").arg(certificate).arg("--key").arg(key);
        }
        command.arg("posix").arg(&root);
        command.env("ROOT_ACCESS_KEY", ACCESS_KEY).env("ROOT_SECRET_KEY", SECRET_KEY);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        // A certificate names a host, not an address.
        let endpoint = format!("{scheme}://localhost:{port}");
        let mut server = S3Server { child, endpoint, tls, directory, _port: taken };
        server.wait_for(port)?;
        Ok(server)
    }

    fn wait_for(&mut self, port: u16) -> anyhow::Result<()> {
        let begin = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            ensure!(self.child.try_wait()?.is_none(), "the S3 server ended at once");
            ensure!(begin.elapsed() < START_TIMEOUT, "the S3 server does not answer");
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// A store in its bucket.
    pub fn url(&self, prefix: &str) -> String {
        format!("s3://{BUCKET}/{prefix}")
    }

    /// What a client has to trust, if it speaks TLS.
    pub fn certificate(&self) -> Option<&Path> {
        self.tls.as_ref().map(|tls| tls.certificate.as_path())
    }

    /// The bucket's name.
    pub fn bucket(&self) -> &'static str {
        BUCKET
    }

    /// The variables of the environment that let a client in.
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

    /// Where it keeps the objects of its bucket, as files of their names.
    pub fn objects(&self) -> PathBuf {
        self.directory.path().join("root").join(BUCKET)
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
