//! Runs an etcd cluster on loopback, in a temporary directory: Debian's etcd.

use std::fs::File;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::ports::ReservedPort;
use super::{Certificate, certificate, tail};

const START_TIMEOUT: Duration = Duration::from_secs(120);
/// The polling interval of a starting member. Each poll runs a command.
const POLL: Duration = Duration::from_millis(20);
const PACKAGES: &str = "install Debian's packages etcd-server and etcd-client";

/// How an etcd cluster is set up.
#[derive(Clone, Debug)]
pub struct EtcdSetup {
    /// The address that the members listen on.
    pub host: Ipv4Addr,
    /// Additional arguments of each member.
    pub arguments: Vec<String>,
    /// TLS between clients and members, with client certificates.
    pub tls: bool,
}

impl Default for EtcdSetup {
    fn default() -> Self {
        EtcdSetup { host: Ipv4Addr::LOCALHOST, arguments: Vec::new(), tls: false }
    }
}

/// The certificates of an etcd cluster with TLS.
#[derive(Clone, Debug)]
pub struct EtcdCertificates {
    /// The authority that signed the others.
    pub authority: Certificate,
    /// The certificate of the members.
    pub server: Certificate,
    /// The certificate of clients.
    pub client: Certificate,
}

struct Member {
    name: String,
    data: PathBuf,
    client_port: ReservedPort,
    peer_port: ReservedPort,
    child: Option<Child>,
}

/// A running etcd cluster. Dropping it ends its members, by process id, and removes its data.
pub struct Etcd {
    members: Vec<Member>,
    setup: EtcdSetup,
    certificates: Option<EtcdCertificates>,
    /// Part of the id of the etcd cluster. A restored cluster gets another one, as in practice.
    token: u32,
    // Dropped last, after the processes have ended.
    directory: TempDir,
}

impl Etcd {
    /// Starts a cluster, and waits until all members are healthy.
    pub fn start(members: usize) -> anyhow::Result<Etcd> {
        Self::start_with(members, EtcdSetup::default())
    }

    /// Like [`Etcd::start`], with options.
    pub fn start_with(members: usize, setup: EtcdSetup) -> anyhow::Result<Etcd> {
        let directory = tempfile::Builder::new()
            .prefix("fulmar-etcd-")
            .tempdir()
            .context("could not create a temporary directory")?;
        let certificates = setup.tls.then(|| create_certificates(directory.path())).transpose()?;
        let member = |number: usize| -> anyhow::Result<Member> {
            let name = format!("m{number}");
            let data = directory.path().join(&name);
            Ok(Member {
                name,
                data,
                client_port: ReservedPort::reserve_free()?,
                peer_port: ReservedPort::reserve_free()?,
                child: None,
            })
        };
        let members = (0..members).map(member).collect::<anyhow::Result<_>>()?;
        let mut etcd = Etcd { members, setup, certificates, token: 0, directory };
        etcd.start_all()?;
        Ok(etcd)
    }

    /// The client addresses of the members, as HOST:PORT.
    pub fn endpoints(&self) -> Vec<String> {
        // The certificate is for a host name, not for an address.
        let host = if self.setup.tls { "localhost".to_owned() } else { self.setup.host.to_string() };
        self.members.iter().map(|member| format!("{host}:{}", member.client_port.number())).collect()
    }

    /// The certificates, if the cluster uses TLS.
    pub fn certificates(&self) -> Option<&EtcdCertificates> {
        self.certificates.as_ref()
    }

    /// A path in the temporary directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Kills a member with SIGKILL.
    pub fn kill(&mut self, member: usize) -> anyhow::Result<()> {
        let mut child = self.members[member].child.take().context("the member does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Starts a member again on its data. Does not wait until it is healthy, because the other
    /// members may be stopped.
    pub fn start_again(&mut self, member: usize) -> anyhow::Result<()> {
        ensure!(self.members[member].child.is_none(), "the member is already running");
        let mut command = self.command(&self.members[member]);
        let log = File::options().create(true).append(true).open(self.path("log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().with_context(|| format!("could not run etcd; {PACKAGES}"))?;
        self.members[member].child = Some(child);
        Ok(())
    }

    /// Stops a member with SIGSTOP. Its connections stay open.
    pub fn freeze(&self, member: usize) -> anyhow::Result<()> {
        self.signal(member, Signal::STOP)
    }

    /// Resumes a member with SIGCONT.
    pub fn thaw(&self, member: usize) -> anyhow::Result<()> {
        self.signal(member, Signal::CONT)
    }

    fn signal(&self, member: usize, signal: Signal) -> anyhow::Result<()> {
        let child = self.members[member].child.as_ref().context("the member does not run")?;
        Ok(kill_process(Pid::from_child(child), signal)?)
    }

    /// Runs etcdctl on all members. Returns its output.
    pub fn etcdctl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        // Longer than etcdctl's, for busy machines.
        let timeouts = ["--dial-timeout=60s", "--command-timeout=120s"];
        self.etcdctl_at(&self.endpoints(), &[&timeouts[..], arguments].concat())
    }

    /// Replaces the data of all members by that of a snapshot, and restarts them.
    pub fn restore(&mut self, snapshot: &Path) -> anyhow::Result<()> {
        self.token += 1;
        for number in 0..self.members.len() {
            self.kill(number)?;
            let Member { name, data, peer_port, .. } = &self.members[number];
            std::fs::remove_dir_all(data)?;
            let mut command = etcdctl();
            command.arg("snapshot").arg("restore").arg(snapshot).arg("--data-dir").arg(data);
            command.args(["--name", name, "--initial-cluster-token", &self.token.to_string()]);
            command.args(["--initial-cluster", &self.initial_cluster()]);
            command.args([
                "--initial-advertise-peer-urls",
                &format!("http://{}:{}", self.setup.host, peer_port.number()),
            ]);
            output(&mut command)?;
        }
        self.start_all()
    }

    fn start_all(&mut self) -> anyhow::Result<()> {
        for number in 0..self.members.len() {
            self.start_again(number)?;
        }
        (0..self.members.len()).try_for_each(|number| self.wait_until_healthy(number))
    }

    /// Waits until a member answers, for which it needs a majority.
    pub fn wait_until_healthy(&mut self, member: usize) -> anyhow::Result<()> {
        let endpoint = [self.endpoints().swap_remove(member)];
        let begin = Instant::now();
        while let Err(error) = self.etcdctl_at(&endpoint, &["endpoint", "health"]) {
            let child = self.members[member].child.as_mut().context("the member does not run")?;
            if let Some(status) = child.try_wait()? {
                let log = tail(&self.path("log"))?;
                bail!("etcd exited before it answered: {status}; end of its log:\n{log}");
            }
            if begin.elapsed() > START_TIMEOUT {
                let log = tail(&self.path("log"))?;
                bail!("etcd did not answer within {START_TIMEOUT:?}: {error}; end of its log:\n{log}");
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    fn etcdctl_at(&self, endpoints: &[String], arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = etcdctl();
        let scheme = self.scheme();
        let urls: Vec<String> = endpoints.iter().map(|endpoint| format!("{scheme}://{endpoint}")).collect();
        command.arg("--endpoints").arg(urls.join(","));
        if let Some(EtcdCertificates { authority, client, .. }) = &self.certificates {
            command.arg("--cacert").arg(&authority.certificate);
            command.arg("--cert").arg(&client.certificate).arg("--key").arg(&client.key);
        }
        output(command.args(arguments))
    }

    fn command(&self, member: &Member) -> Command {
        let client_url = format!("{}://{}:{}", self.scheme(), self.setup.host, member.client_port.number());
        let peer_url = format!("http://{}:{}", self.setup.host, member.peer_port.number());
        let mut command = Command::new("etcd");
        command.args(["--name", &member.name]).arg("--data-dir").arg(&member.data);
        command.args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url]);
        command.args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url]);
        command.args(["--initial-cluster", &self.initial_cluster()]);
        command.args(["--initial-cluster-token", &self.token.to_string()]);
        // A process that is killed loses no data that it wrote without a sync.
        command.args(["--unsafe-no-fsync", "--logger", "zap", "--log-level", "warn"]);
        if let Some(EtcdCertificates { authority, server, .. }) = &self.certificates {
            command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(&authority.certificate);
            command.arg("--cert-file").arg(&server.certificate).arg("--key-file").arg(&server.key);
        }
        command.args(&self.setup.arguments);
        command
    }

    fn scheme(&self) -> &'static str {
        if self.setup.tls { "https" } else { "http" }
    }

    fn initial_cluster(&self) -> String {
        let peer = |member: &Member| {
            format!("{}=http://{}:{}", member.name, self.setup.host, member.peer_port.number())
        };
        self.members.iter().map(peer).collect::<Vec<_>>().join(",")
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for child in self.members.iter_mut().filter_map(|member| member.child.as_mut()) {
            // The member may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn etcdctl() -> Command {
    let mut command = Command::new("etcdctl");
    command.env("ETCDCTL_API", "3");
    command
}

fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("could not run etcdctl; {PACKAGES}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed: {errors}");
    Ok(String::from_utf8(output.stdout)?)
}

fn create_certificates(directory: &Path) -> anyhow::Result<EtcdCertificates> {
    let authority = certificate(directory, "authority", &[])?;
    let signed =
        ["-CA", "authority.crt", "-CAkey", "authority.key", "-addext", "basicConstraints=critical,CA:FALSE"];
    let server = certificate(directory, "server", &signed)?;
    let client = certificate(directory, "client", &signed)?;
    Ok(EtcdCertificates { authority, server, client })
}
