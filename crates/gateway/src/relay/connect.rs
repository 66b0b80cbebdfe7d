//! Connects a front to a session at the owner of the partition.

use std::sync::Arc;
use std::time::Duration;

use bytes::Buf;
use fulmar_engine::{Error, sqlstate};
use fulmar_meta::{SYSTEM_PARTITION, Tenant};
use fulmar_pgwire::wire::Wire;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::time::{Instant, sleep, timeout};

use super::front::Front;
use super::journal::Journal;
use super::message::{self, Hello, SessionHello, Values};
use super::pump::{PIPE_BYTES, pump};
use super::resume::no_owner;
use crate::cluster::{Cluster, Owner};
use crate::identity::Identity;
use crate::registry::RegistryEntry;
use crate::{startup, worker};

/// Maximum duration of an attempt to connect to a node.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client that connects waits for an owner of its database.
const OWNER_TIMEOUT: Duration = Duration::from_secs(30);
/// The interval of attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// The epoch of the system database if it has no owner: it then runs at each node.
pub(super) const NO_EPOCH: u32 = 0;
/// Maximum size of the error of a session that is refused.
const MAX_REFUSAL_BYTES: usize = 64 << 10;

/// The result of an attempt to connect.
pub(super) enum Connected {
    Accepted(DuplexStream),
    /// The node refuses the session. The ErrorResponse for the client.
    Refused(Vec<u8>),
    /// The node cannot be reached, or serves no sessions now.
    Lost,
}

/// Why a client cannot be connected to a session.
pub(crate) enum Unavailable {
    Error(Error),
    /// The ErrorResponse of the session's node.
    Message(Vec<u8>),
}

/// Starts a session at `owner`.
pub(super) async fn connect(context: &startup::Context, owner: Owner, hello: SessionHello) -> Connected {
    timeout(CONNECT_TIMEOUT, attempt(context, owner, hello)).await.unwrap_or(Connected::Lost)
}

async fn attempt(context: &startup::Context, owner: Owner, hello: SessionHello) -> Connected {
    let Some(cluster) = &context.cluster else { return Connected::Lost };
    let (mut near, far) = duplex(PIPE_BYTES);
    if owner.node == cluster.this_node() {
        worker::serve_relayed_here(hello, far);
    } else {
        let Ok(stream) = cluster.open_session_stream(owner.node).await else { return Connected::Lost };
        tokio::task::spawn_local(pump(stream, far));
        if send_hello(&mut near, &Hello::Session(Box::new(hello))).await.is_none() {
            return Connected::Lost;
        }
    }
    match first_message(&mut near).await {
        Some(message) if message[0] == message::ACCEPTED => Connected::Accepted(near),
        Some(message) if message[0] == b'E' && !is_temporary(&message) => Connected::Refused(message),
        _ => Connected::Lost,
    }
}

/// Writes the first message of a stream.
async fn send_hello(pipe: &mut DuplexStream, hello: &Hello) -> Option<()> {
    let mut output = Vec::new();
    message::put(&mut output, message::HELLO, &serde_json::to_vec(hello).ok()?);
    pipe.write_all(&output).await.ok()
}

async fn first_message(pipe: &mut DuplexStream) -> Option<Vec<u8>> {
    let mut message = vec![0; 5];
    pipe.read_exact(&mut message).await.ok()?;
    let length = (&message[1..]).get_u32() as usize;
    if !(4..=MAX_REFUSAL_BYTES).contains(&length) {
        return None;
    }
    message.resize(length + 1, 0);
    pipe.read_exact(&mut message[5..]).await.ok()?;
    Some(message)
}

/// Returns true if the node only cannot serve a session now.
fn is_temporary(error: &[u8]) -> bool {
    let state = format!("C{}\0", sqlstate::CANNOT_CONNECT_NOW);
    error.windows(state.len()).any(|window| window == state.as_bytes())
}

/// Cancels the statement of a session at another node, or through the front at another node.
pub(crate) fn send_cancel(context: Arc<startup::Context>, node: u32, pid: i32, secret: i32) {
    tokio::task::spawn_local(async move {
        let Some(cluster) = &context.cluster else { return };
        if node == cluster.this_node() {
            return context.registry.cancel_session(pid, secret);
        }
        let cancel = async {
            // A request that does not arrive has no effect, as in PostgreSQL.
            let Ok(mut stream) = cluster.open_session_stream(node).await else { return };
            let mut output = Vec::new();
            let Ok(body) = serde_json::to_vec(&Hello::Cancel { pid, secret }) else { return };
            message::put(&mut output, message::HELLO, &body);
            if stream.send(&output).await.is_ok() {
                stream.finish();
                let _ = stream.receive().await; // the other side has read the request when it ends
            }
        };
        let _ = timeout(CONNECT_TIMEOUT, cancel).await;
    });
}

/// The address of the owner for clients. Empty if that is this node, or its address is not known.
pub(super) fn owner_address(cluster: &dyn Cluster, owner: Owner) -> String {
    if owner.node == cluster.this_node() {
        return String::new();
    }
    let nodes = cluster.nodes();
    nodes.into_iter().find(|node| node.id == owner.node).map(|node| node.sql).unwrap_or_default()
}

/// Connects a client to a session at the owner of its database. Waits if there is none. Also returns
/// the address of the owner.
pub(crate) async fn open_front(
    entry: RegistryEntry,
    identity: Identity,
    [values, defaults]: [Values; 2],
    context: Arc<startup::Context>,
    cluster: Arc<dyn Cluster>,
) -> Result<(String, impl FnOnce(Wire) -> Front), Unavailable> {
    let mut hello = SessionHello {
        partition: identity.tenant.partition.0,
        user: identity.user.clone(),
        authenticated: identity.account.is_some(),
        password: identity.account.as_deref().and_then(message::fingerprint),
        address: identity.address,
        pid: entry.handle.pid,
        secret: entry.handle.secret(),
        defaults: defaults.clone(),
        values: values.clone(),
        owner: String::new(),
    };
    let deadline = Instant::now() + OWNER_TIMEOUT;
    let mut known = cluster.owner(identity.tenant.partition);
    loop {
        cluster.check_available(identity.tenant.partition).map_err(Unavailable::Error)?;
        let owner = match known.take() {
            Some(owner) => Some(owner),
            None => find_owner(&*cluster, &identity.tenant).await,
        };
        let connected = match owner {
            Some(owner) => {
                hello.owner = owner_address(&*cluster, owner);
                connect(&context, owner, hello.clone()).await
            }
            None => Connected::Lost,
        };
        match (connected, owner) {
            (Connected::Accepted(upstream), Some(owner)) => {
                let engine = context.engine.clone();
                let journal = Journal::new(values, Box::new(move || engine.new_transaction_id()));
                let parts = (entry, identity, defaults);
                let address = hello.owner.clone();
                let front = move |wire| {
                    Front::new(wire, journal, parts, context, cluster, (upstream, owner, hello.owner))
                };
                return Ok((address, front));
            }
            (Connected::Refused(message), _) => return Err(Unavailable::Message(message)),
            _ if Instant::now() < deadline => sleep(RETRY_INTERVAL).await,
            _ => return Err(Unavailable::Error(no_owner(&identity.tenant.name))),
        }
    }
}

async fn find_owner(cluster: &dyn Cluster, tenant: &Tenant) -> Option<Owner> {
    match cluster.find_owner(tenant.partition).await {
        Ok(None) if tenant.partition == SYSTEM_PARTITION => {
            Some(Owner { node: cluster.this_node(), epoch: NO_EPOCH })
        }
        found => found.ok().flatten(),
    }
}
