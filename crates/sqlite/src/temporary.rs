//! Accounting of temporary files. Bytes are charged before they are written.
//!
//! ```text
//! sorts, journals, temporary tables (spill.rs)        \
//! pages of a large transaction      (spilled_pages.rs) +> Charge > Quota > TenantSpace > NodeSpace
//! results waiting for their client  (the gateway)     /   file    session  tenant
//! ```
//!
//! - A tenant's files are limited to its `temp_file_limit`, and to half of the node's limit.
//! - The node's limit is half of the free disk space above the reserve. It follows the disk,
//!   so temporary files alone never bring the disk down to its reserve, where
//!   commits are rejected.
//!
//! Exceeding a limit fails with SQLSTATE 53400, as in PostgreSQL, or with 53100 if no disk space
//! above the reserve is free. SQLite may have to write a little more to roll back the failed
//! statement: the quota can be overdrawn for that ([`Quota::set_overdraft`]), and these bytes are
//! still counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::{Error, Result, sqlstate};

/// The node's limit while the size of its disk is not known.
const UNKNOWN_DISK_BYTES: u64 = 8 << 30;
/// One tenant may use 1/2 of the node's limit.
const TENANT_DIVISOR: u64 = 2;
/// All tenants together may use 1/2 of the free disk space above the reserve.
const NODE_DIVISOR: u64 = 2;

/// Temporary files of all tenants.
#[derive(Debug)]
pub struct NodeSpace {
    limit_bytes: AtomicU64,
    used_bytes: AtomicU64,
}

impl NodeSpace {
    /// Creates the account of a node.
    pub fn new() -> Arc<NodeSpace> {
        Arc::new(NodeSpace { limit_bytes: AtomicU64::new(UNKNOWN_DISK_BYTES), used_bytes: AtomicU64::new(0) })
    }

    /// Sets the limit from the free space of the disk, which is already reduced by the existing
    /// files.
    pub fn follow_disk(&self, available_bytes: u64, reserve_bytes: u64) {
        let free_bytes = available_bytes.saturating_add(self.used_bytes()).saturating_sub(reserve_bytes);
        self.limit_bytes.store(free_bytes / NODE_DIVISOR, Ordering::Relaxed);
    }

    /// Bytes charged for all tenants.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// The current limit.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes.load(Ordering::Relaxed)
    }
}

/// Temporary files of one tenant.
#[derive(Debug)]
pub struct TenantSpace {
    node: Arc<NodeSpace>,
    used_bytes: AtomicU64,
}

/// Adds to a counter unless the sum exceeds `limit`. Returns true if it was added.
fn try_add(counter: &AtomicU64, bytes: u64, limit: u64) -> bool {
    let add = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= limit);
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
}

impl TenantSpace {
    /// Creates the account of a tenant.
    pub fn new(node: &Arc<NodeSpace>) -> Arc<TenantSpace> {
        Arc::new(TenantSpace { node: node.clone(), used_bytes: AtomicU64::new(0) })
    }

    fn take(&self, bytes: u64, limit_bytes: u64) -> Result<()> {
        let node_bytes = self.node.limit_bytes();
        let share_bytes = node_bytes / TENANT_DIVISOR;
        if !try_add(&self.used_bytes, bytes, limit_bytes.min(share_bytes)) {
            return Err(match limit_bytes <= share_bytes {
                true => exceeds_limit(limit_bytes),
                false => exceeds_share("the database's share of the disk", share_bytes),
            });
        }
        if !try_add(&self.node.used_bytes, bytes, node_bytes) {
            self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(exceeds_share("the node's share of the disk", node_bytes));
        }
        Ok(())
    }

    fn overdraw(&self, bytes: u64) {
        self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.node.used_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn give(&self, bytes: u64) {
        self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.node.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes charged for the tenant.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }
}

fn exceeds_limit(limit_bytes: u64) -> Error {
    let message = format!("temporary file size exceeds temp_file_limit ({}kB)", limit_bytes / 1024);
    Error::new(sqlstate::CONFIGURATION_LIMIT, message)
        .detail("The limit applies to all sessions of the database together.")
        .hint(
            "Sort or change fewer rows at a time, and fetch large results completely. A superuser can raise the limit with \
             ALTER DATABASE ... SET temp_file_limit.",
        )
}

fn exceeds_share(share: &str, limit_bytes: u64) -> Error {
    if limit_bytes == 0 {
        return Error::new(sqlstate::DISK_FULL, "disk nearly full: temporary files are rejected")
            .detail("The free space is below the reserve (--disk-reserve).")
            .hint("Free space on the disk of the data directory.");
    }
    let message = format!("temporary file size exceeds {share} ({}kB)", limit_bytes / 1024);
    Error::new(sqlstate::CONFIGURATION_LIMIT, message)
        .detail(
            "Temporary files of all databases may use half of the free disk space above the reserve (--disk-reserve), those \
             of one database a quarter.",
        )
        .hint("Sort or change fewer rows at a time, fetch large results completely, or free disk space.")
}

/// The quota of a session.
#[derive(Debug)]
pub struct Quota {
    space: Arc<TenantSpace>,
    limit_bytes: AtomicU64,
    overdraft: AtomicBool,
}

impl Quota {
    /// Creates the quota of a session of a tenant.
    pub fn new(space: Arc<TenantSpace>, limit_bytes: u64) -> Arc<Quota> {
        Arc::new(Quota { space, limit_bytes: AtomicU64::new(limit_bytes), overdraft: AtomicBool::new(false) })
    }

    /// Sets the tenant's `temp_file_limit`.
    pub fn set_limit(&self, bytes: u64) {
        self.limit_bytes.store(bytes, Ordering::Relaxed);
    }

    /// While set, charges beyond the limits are accepted: a rejected statement is being rolled
    /// back.
    pub(crate) fn set_overdraft(&self, on: bool) {
        self.overdraft.store(on, Ordering::Relaxed);
    }

    /// Bytes charged by all sessions of the tenant.
    pub fn used_bytes(&self) -> u64 {
        self.space.used_bytes()
    }

    fn take(&self, bytes: u64) -> Result<()> {
        match self.space.take(bytes, self.limit_bytes.load(Ordering::Relaxed)) {
            Err(_) if self.overdraft.load(Ordering::Relaxed) => {
                self.space.overdraw(bytes);
                Ok(())
            }
            taken => taken,
        }
    }
}

/// The charged bytes of one temporary file. Dropping it releases them.
#[derive(Debug)]
pub struct TemporaryCharge {
    quota: Arc<Quota>,
    bytes: u64,
}

impl TemporaryCharge {
    /// Creates the charge of an empty file.
    pub fn new(quota: &Arc<Quota>) -> TemporaryCharge {
        TemporaryCharge { quota: quota.clone(), bytes: 0 }
    }

    /// Charges the growth of a file to `bytes`. Fails with 53400.
    pub fn grow_to(&mut self, bytes: u64) -> Result<()> {
        let more = bytes.saturating_sub(self.bytes);
        if more > 0 {
            self.quota.take(more)?;
            self.bytes = bytes;
        }
        Ok(())
    }

    /// Charges more bytes.
    pub fn grow_by(&mut self, bytes: u64) -> Result<()> {
        self.grow_to(self.bytes.saturating_add(bytes))
    }

    /// Releases what is charged beyond `bytes`.
    pub fn shrink_to(&mut self, bytes: u64) {
        let spare = self.bytes.saturating_sub(bytes);
        if spare > 0 {
            self.quota.space.give(spare);
            self.bytes = bytes;
        }
    }
}

impl Drop for TemporaryCharge {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn node(free_bytes: u64) -> Arc<NodeSpace> {
        let node = NodeSpace::new();
        node.follow_disk(free_bytes + 10 * MIB, 10 * MIB);
        node
    }

    #[test]
    fn charges_are_limited_for_a_tenant_and_released() {
        let node = node(400 * MIB);
        let tenant = TenantSpace::new(&node);
        let quota = Quota::new(tenant.clone(), 50 * MIB);
        let (mut one, mut other) = (TemporaryCharge::new(&quota), TemporaryCharge::new(&quota));
        one.grow_to(30 * MIB).unwrap();
        other.grow_to(20 * MIB).unwrap();
        let error = other.grow_by(1).unwrap_err();
        assert_eq!(error.state(), sqlstate::CONFIGURATION_LIMIT);
        assert_eq!(error.message(), "temporary file size exceeds temp_file_limit (51200kB)");
        assert_eq!((tenant.used_bytes(), node.used_bytes()), (50 * MIB, 50 * MIB));

        one.shrink_to(10 * MIB);
        other.grow_to(40 * MIB).unwrap();
        quota.set_overdraft(true);
        one.grow_to(11 * MIB).unwrap();
        quota.set_overdraft(false);
        assert!(one.grow_to(12 * MIB).is_err() && tenant.used_bytes() == 51 * MIB);
        drop((one, other));
        assert_eq!((tenant.used_bytes(), node.used_bytes()), (0, 0));
    }

    #[test]
    fn tenants_without_a_limit_share_the_disk() {
        let node = node(400 * MIB);
        let charges: Vec<_> = (0..3)
            .map(|_| {
                let mut charge = TemporaryCharge::new(&Quota::new(TenantSpace::new(&node), u64::MAX));
                let most = (1..200).rev().find(|mib| charge.grow_to(mib * MIB).is_ok());
                (charge, most)
            })
            .collect();
        let most: Vec<_> = charges.iter().map(|(_, most)| *most).collect();
        assert_eq!(
            most,
            [Some(100), Some(100), None],
            "the limit is a quarter for one tenant and half for all"
        );
        // The existing files have reduced the free space; the limit is unchanged.
        node.follow_disk(210 * MIB, 10 * MIB);
        assert_eq!(node.limit_bytes(), 200 * MIB);
        // Other files have filled the disk, so charges fail.
        let mut late = TemporaryCharge::new(&Quota::new(TenantSpace::new(&node), u64::MAX));
        node.follow_disk(50 * MIB, 100 * MIB);
        let error = late.grow_to(1).unwrap_err();
        assert!(error.message().contains("the node's share") && error.state() == "53400", "{error}");
        drop(charges);
        node.follow_disk(50 * MIB, 100 * MIB);
        assert_eq!(late.grow_to(1).unwrap_err().state(), sqlstate::DISK_FULL);
    }
}
