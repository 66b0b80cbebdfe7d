//! The state of a session.

use std::sync::Arc;

use fulmar_engine::TemporarySpace;
use fulmar_meta::SYSTEM_PARTITION;

use super::context::Context;
use super::copy::CopyHold;
use super::copy_in::CopyIn;
use super::link::Link;
use super::memory_quota::{Quota, Reservation};
use super::rows::Output;
use super::stall::{Progress, Rejected};
use super::statements::Statements;
use super::temporary_tables::TableTransfer;
use crate::identity::{CONSOLE_APPLICATION, Identity};
use crate::load::KeySampler;
use crate::metrics::WorkerMetrics;
use crate::settings::Settings;
use crate::tenant_stats::TenantStats;

/// A client's session.
pub(crate) struct Session {
    pub(super) link: Link,
    /// Responses that have not been sent.
    pub(super) output: Output,
    /// The memory charge for the message that is being received or handled.
    pub(super) received: Reservation,
    /// The receive progress of that message.
    pub(super) progress: Progress,
    /// A rejected message that is discarded while it arrives.
    pub(super) rejected: Option<Box<Rejected>>,
    pub(super) context: Arc<Context>,
    pub(super) metrics: Arc<WorkerMetrics>,
    pub(super) identity: Identity,
    pub(super) stats: Arc<TenantStats>,
    /// Its statements and its CPU time count as the tenant's. Those of the console do not.
    pub(super) counts_statements: bool,
    /// Selects statements whose keys are counted.
    pub(super) keys: KeySampler,
    /// The generation of the tenant's limits that are applied.
    pub(super) limits_seen: u64,
    /// The generation of the access rights that were checked.
    pub(super) privileges_seen: u64,
    pub(super) settings: Settings,
    /// The memory charge for `settings`.
    pub(super) settings_reservation: Reservation,
    pub(super) statements: Statements,
    /// Charges temporary files of results to the tenant.
    pub(super) temporary: TemporarySpace,
    /// True after an error in the extended protocol: messages are skipped until Sync.
    pub(super) skipping: bool,
    pub(super) copy: Option<Box<CopyIn>>,
    /// Keeps the partition at this node during a COPY, and longer if it cannot be repeated.
    pub(super) copy_hold: Option<Box<CopyHold>>,
    /// The client is connected to a front ([`crate::relay`]), possibly at another node.
    pub(super) relayed: bool,
    /// Temporary tables, for the front.
    pub(super) tables: TableTransfer,
    /// A transaction has ended since the last ReadyForQuery.
    pub(super) has_ended_transaction: bool,
}

impl Session {
    /// Creates the session of an authenticated client.
    pub(crate) fn new(
        link: Link,
        context: Arc<Context>,
        metrics: Arc<WorkerMetrics>,
        identity: Identity,
        settings: Settings,
    ) -> Session {
        let stats = context.tenants.of(identity.tenant.partition);
        let memory = context.memory.of(identity.tenant.partition);
        let temporary = link.partition.session().temporary_space();
        // Clients choose their application name. Only a superuser's session can be the console's.
        let application = settings.get("application_name").unwrap_or_default();
        let counts_statements = !(identity.superuser && application.starts_with(CONSOLE_APPLICATION));
        let mut session = Session {
            link,
            output: Output::default(),
            received: Reservation::default(),
            progress: Progress::default(),
            rejected: None,
            context,
            metrics,
            identity,
            stats,
            counts_statements,
            keys: KeySampler::default(),
            limits_seen: 0,
            privileges_seen: 0,
            settings,
            settings_reservation: Reservation::default(),
            statements: Statements::new(Quota::of_memory(memory)),
            temporary,
            skipping: false,
            copy: None,
            copy_hold: None,
            relayed: false,
            tables: TableTransfer::default(),
            has_ended_transaction: false,
        };
        session.apply_settings();
        session
    }

    /// Applies the parameters that affect the connection or the engine session.
    pub(super) fn apply_settings(&mut self) {
        self.settings_reservation.shrink(self.settings.bytes() as u64);
        self.link.timeout = self.settings.statement_timeout();
        self.link.idle_timeout = self.settings.idle_in_transaction_timeout();
        self.link.partition.session_mut().set_default_read_only(self.settings.is_read_only());
        self.link.partition.session_mut().set_as_of(self.settings.as_of());
        // The system database holds no tenant data and must always accept connections, so staleness
        // does not apply to it.
        let is_system = self.identity.tenant.partition == SYSTEM_PARTITION;
        self.link.partition.session_mut().set_staleness((!is_system).then(|| self.settings.staleness()));
    }
}
