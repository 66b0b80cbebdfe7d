//! Background tasks of a node: the sweeper, which keeps part of the page memory free, and the poll
//! of the disk.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::cache::RETRY_INTERVAL;
use crate::node::Node;
use crate::reserve::MIN_EVICTION_BYTES;
use crate::{memory, page_memory};

/// Minimum interval between the sweeper's checks of the process's memory usage.
const BALANCE_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum interval between two runs of the sweeper.
const SWEEPER_INTERVAL: Duration = Duration::from_secs(1);

/// How often the file system is polled.
const DISK_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Adjusts the budget to the process's actual memory usage, and returns unused page memory to the
/// system.
fn balance(node: &Node) {
    let over = match node.whole_process.then(memory::of_process).flatten() {
        Some(process_bytes) => node.memory.balance(process_bytes, page_memory::slot_usage()),
        None => 0,
    };
    page_memory::give_back(over);
}

/// Starts the sweeper, which keeps part of the budget free. It ends when the node is dropped.
pub fn spawn_sweeper(node: &Arc<Node>) {
    let (memory, weak) = (node.memory.clone(), Arc::downgrade(node));
    tokio::spawn(async move {
        let mut balanced = None;
        while let Some(node) = weak.upgrade() {
            if balanced.is_none_or(|balanced: Instant| balanced.elapsed() >= BALANCE_INTERVAL) {
                balanced = Some(Instant::now());
                balance(&node);
                if node.heap.is_crowded() {
                    node.cache.close_idle_connections();
                }
            }
            let excess = memory.excess_bytes();
            if excess > 0 && node.cache.evict(excess.min(MIN_EVICTION_BYTES)) != Some(0) {
                drop(node);
                tokio::task::yield_now().await;
                continue;
            }
            node.cache.free_limbo();
            drop(node);
            // Any reservation above the mark wakes the sweeper, which is useless while nothing can
            // be evicted.
            tokio::time::sleep(RETRY_INTERVAL).await;
            let _ = tokio::time::timeout(SWEEPER_INTERVAL, memory.crowded()).await;
        }
    });
}

/// Polls the node's disk, and adapts the limits of temporary files and the disk cache to its free
/// space.
pub fn poll_disk(node: &Node) {
    if node.disk.poll() {
        let (available_bytes, reserve_bytes) = (node.disk.available_bytes(), node.disk.reserve_bytes());
        node.temporary.follow_disk(available_bytes, reserve_bytes);
        if let Some(cache) = node.store.disk_cache() {
            cache.limit_to_free_space(available_bytes, reserve_bytes);
        }
    }
}

/// Polls the disk periodically until the node is dropped.
pub fn spawn_disk_poll(node: &Arc<Node>) {
    let weak = Arc::downgrade(node);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(DISK_POLL_INTERVAL).await;
            let Some(node) = weak.upgrade() else { return };
            // statvfs may block on a remote file system.
            let polled = tokio::task::spawn_blocking(move || poll_disk(&node)).await;
            if polled.is_err() {
                return;
            }
        }
    });
}
