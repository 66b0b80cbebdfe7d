//! What the cluster's controller may do: settings, pinned databases, forbidden nodes.

use fulmar_dialect::admin::AdminStatement;

use super::cluster::require_cluster;
use super::context::Context;
use crate::Result;
use crate::cluster::ControlChange;
use crate::events::{Event, Kind};
use crate::identity::Identity;

/// Runs a statement, and records it as an event.
pub(super) async fn run(admin: &AdminStatement, context: &Context, identity: &Identity) -> Result<()> {
    let cluster = require_cluster(context)?;
    let event = Event::new(Kind::ControlChanged);
    let (change, event) = match admin {
        AdminStatement::PinDatabase { name, is_pinned } => {
            let tenant = context.find(name)?;
            let (partition, is_pinned) = (tenant.partition, *is_pinned);
            let event = event.database(&tenant).detail("pinned", is_pinned);
            (ControlChange::Pin { partition, is_pinned }, event)
        }
        AdminStatement::ForbidNode { name, is_forbidden } => {
            let (node, is_forbidden) = (name.clone(), *is_forbidden);
            let event = event.detail("node", name.as_str()).detail("forbidden", is_forbidden);
            (ControlChange::Forbid { node, is_forbidden }, event)
        }
        AdminStatement::AlterSystem { name, value } => {
            let event = event.detail("setting", name.as_str());
            let event = event.detail("value", value.as_deref().unwrap_or("default"));
            (ControlChange::Set { name: name.clone(), value: value.clone() }, event)
        }
        _ => (ControlChange::CancelPlan, event.detail("plan", "cancelled")),
    };
    cluster.change_control(change).await?;
    context.record(event, identity);
    Ok(())
}
