//! The controller: decides where databases are served and by how many nodes, and does it.
//!
//! ```text
//!   every node ── load report ──┐
//!   owners, catalog, records ───┴─► picture ─► fulmar_control ─► decisions ─┬─► moves: migrations
//!                                      └─► forecasts ─► outlook ──▲         └─► nodes: provisioner
//! ```
//!
//! One elected node runs it ([`fulmar_cluster::election`]) while the mode is not `off`, one round
//! after the other ([`run`]):
//!
//! 1. Check that the term has not ended, and apply changed settings.
//! 2. Get the load reports of all nodes ([`reports`]), and build a picture ([`picture`]). A node
//!    above `high` in its last report also counts accesses per key and reports its hot keys
//!    (E-Store's two phases).
//! 3. Advance the plan in progress: nodes that are added or removed ([`nodes`]), and moves
//!    ([`moves`]).
//! 4. Record what has come of earlier decisions ([`decisions`]).
//! 5. Decide ([`fulmar_control::policy::Controller::decide`]), record, and carry out in mode `on`.
//!
//! Moves that were decided and have not ended count as done in the picture, so they are not decided
//! again. Series of loads and their forecasts are kept by a thread ([`forecast`]).
//!
//! A node that has reported lately and does not report in a round is a hole. If more than a tenth of
//! the nodes are, nothing is decided in that round, and the series get no value. Otherwise, and after
//! [`reports::MAX_HOLE`], the node's last report stands in. A jump of a clock decides nothing either
//! ([`brain`], [`clock`]).
//!
//! # Two controllers
//! Every change of the controller's records compares the role's record, and so does the journal that
//! starts a migration and the removal of a member, at whichever node ([`RoleFence`]). A controller
//! whose term has ended can therefore change nothing.
//!
//! The provisioner is not fenced: a call may outlive its controller, or take effect late. It is called
//! only for nodes whose names are in the plan, and a name is not used again, so a late call concerns a
//! node that was to be added or removed, and no other. Before a node is removed, the term is checked
//! once more, and that no database needs the node.
//!
//! # Crash points
//! | the controller dies | what happens |
//! | --- | --- |
//! | after a node's name was recorded in the plan, before or after it was added | the next controller adds it (again), or removes it after `start_timeout` |
//! | while a node is drained | the next controller drains it to its end, or keeps it if that is not possible |
//! | after a node was stopped, before it was forgotten | the next controller removes it (again), and forgets it |
//! | while tenants are moved | the running migrations complete by themselves; the others are decided again |
//! | after a node was added and not recorded (a provisioner that lies) | a listed node that does not serve and is in no plan is removed after `start_timeout` |
//!
//! # Failures of provisioners
//! A call is limited to `provisioner_timeout`, and repeated [`nodes::MAX_ATTEMPTS`] times with growing
//! pauses. Then the plan is undone, and no node is added or removed for a growing time. Each failure
//! is an event.

mod balance;
mod brain;
mod changes;
mod clock;
mod decisions;
mod forecast;
mod moves;
mod nodes;
mod observed;
mod picture;
mod records;
mod reports;
mod run;
mod texts;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fulmar_cluster::election;
use fulmar_gateway::events::{Event, Kind};
use tokio::time::timeout;

pub(crate) use observed::Control;
pub(crate) use records::{forbidden_key, pin_key};

use crate::{Node, Partitions};
use run::Run;

/// The name of the role.
const ROLE: &str = "controller";
/// How often a node checks whether there is a controller.
const CAMPAIGN_INTERVAL: Duration = Duration::from_secs(2);

impl Node {
    /// Campaigns while a controller is needed, and controls the cluster while elected.
    pub(crate) async fn control_cluster(self: Arc<Self>, partitions: Arc<dyn Partitions>) {
        let mut last_term = 0;
        loop {
            let changed = self.control().changed();
            if self.is_draining.load(Ordering::Relaxed) {
                return;
            }
            if !self.control().is_needed() {
                changed.await;
                continue;
            }
            let node = (self.id(), &self.begun().read);
            match election::campaign(self.environment(), ROLE, node).await {
                Ok(Some(term)) => {
                    if term.number() != last_term {
                        last_term = term.number();
                        tracing::info!(term = term.number(), "this node controls the cluster");
                        partitions.record(Event::new(Kind::ControllerElected));
                    }
                    match Run::begin(self.clone(), partitions.clone(), term).await {
                        Ok(mut run) => {
                            run.until_ended().await;
                            self.control().set_forecasts(None);
                        }
                        Err(error) => {
                            tracing::error!(%error, "the controller cannot read its records");
                        }
                    }
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, "could not elect a controller; will retry");
                }
            }
            let _ = timeout(CAMPAIGN_INTERVAL, self.control().changed()).await;
        }
    }
}
