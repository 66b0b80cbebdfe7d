//! The connections of a node to the other nodes, dialed on demand.

use std::sync::Arc;

use async_trait::async_trait;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::{Connection, Error};

/// Dials nodes.
#[async_trait]
pub trait Dial: Send + Sync + 'static {
    /// Opens a connection to a node, and runs its driver in the background. Must give up after a
    /// time: all callers wait for the same attempt.
    async fn dial(&self, node: u32, address: &str) -> Result<Connection, Error>;
}

type Dialing = Shared<BoxFuture<'static, Result<Connection, Error>>>;

/// At most one connection to each node. Clones share them.
#[derive(Clone)]
pub struct Peers {
    dial: Arc<dyn Dial>,
    nodes: Arc<Mutex<HashMap<u32, Dialing>>>,
}

impl Peers {
    /// No connections yet.
    pub fn new(dial: impl Dial) -> Self {
        Peers { dial: Arc::new(dial), nodes: Arc::default() }
    }

    /// Returns the connection to a node, and opens it if there is none, or the last one has ended.
    /// Concurrent callers share the attempt and its result.
    pub async fn connection(&self, node: u32, address: &str) -> Result<Connection, Error> {
        let dialing = {
            let mut nodes = self.nodes.lock();
            let usable = nodes.get(&node).filter(|dialing| match dialing.peek() {
                Some(Ok(connection)) => connection.ended().is_none(),
                Some(Err(_)) => false,
                None => true,
            });
            match usable {
                Some(dialing) => dialing.clone(),
                None => {
                    let (dial, address) = (self.dial.clone(), address.to_owned());
                    let dialing = async move { dial.dial(node, &address).await }.boxed().shared();
                    nodes.insert(node, dialing.clone());
                    dialing
                }
            }
        };
        dialing.await
    }

    /// Closes the connection to a node, for example because its incarnation has ended.
    pub fn disconnect(&self, node: u32) {
        let dialing = self.nodes.lock().remove(&node);
        if let Some(Ok(connection)) = dialing.as_ref().and_then(|dialing| dialing.peek()) {
            connection.close();
        }
    }
}
