//! Applies the tenant's limits to a session: bounds of its parameters ([`crate::settings`]) and
//! limits of its transactions.
//!
//! A changed limit takes effect with the next message. Detecting a change costs one comparison of a
//! generation number per message.

use fulmar_engine::TransactionLimits;
use fulmar_meta::{Limit, LiveLimits};

use super::state::Session;

impl Session {
    /// Applies the tenant's limits if they have changed.
    pub(super) fn apply_limits(&mut self) {
        let generation = self.identity.limits.generation();
        if generation == self.limits_seen {
            return;
        }
        self.limits_seen = generation;
        let limits = &self.identity.limits;
        self.settings.set_bounds(limits, self.identity.access);
        let bytes = |limit| limits.get(limit).map_or(u64::MAX, |kilobytes| kilobytes * 1024);
        let temporary_bytes = temporary_bytes(limits);
        self.temporary.set_limit(temporary_bytes);
        self.link.partition.session_mut().set_limits(TransactionLimits {
            held_bytes: bytes(Limit::TransactionMemory),
            database_bytes: bytes(Limit::MaxSize),
            temporary_bytes,
            value_bytes: bytes(Limit::MaxValueSize),
            pattern_bytes: limits.get(Limit::MaxPatternLength).unwrap_or(u64::MAX),
            parameters: limits.get(Limit::MaxParameters).unwrap_or(u64::MAX),
        });
        let floor = limits.get(Limit::CacheFloor).map_or(0, |kilobytes| kilobytes * 1024);
        self.link.partition.session_mut().set_cache_floor(floor);
        self.apply_settings();
    }
}

/// The default of `temp_file_limit` as a multiple of `max_size`. A VACUUM of a full database needs
/// three times the database's size.
const TEMPORARY_PER_SIZE: u64 = 4;
/// The minimum of that default.
const MIN_TEMPORARY_KILOBYTES: u64 = 64 << 10;

/// Maximum size of the temporary files of a tenant's sessions. The engine lowers it to the tenant's
/// share of the disk.
fn temporary_bytes(limits: &LiveLimits) -> u64 {
    let of_size = || {
        let kilobytes = limits.get(Limit::MaxSize)?.saturating_mul(TEMPORARY_PER_SIZE);
        Some(kilobytes.max(MIN_TEMPORARY_KILOBYTES))
    };
    let kilobytes = limits.get(Limit::TempFileLimit).or_else(of_size);
    kilobytes.map_or(u64::MAX, |kilobytes| kilobytes * 1024)
}

#[cfg(test)]
mod tests {
    use fulmar_meta::Limits;

    use super::*;

    #[test]
    fn temp_file_limit_defaults_to_four_times_max_size() {
        let of = |size, limit| {
            let mut limits = Limits::default();
            limits.set(Limit::MaxSize, size);
            limits.set(Limit::TempFileLimit, limit);
            temporary_bytes(&LiveLimits::new(&limits))
        };
        assert_eq!(of(None, None), u64::MAX);
        assert_eq!(of(Some(64 << 10), None), 256 << 20);
        assert_eq!(of(Some(1 << 10), None), 64 << 20);
        assert_eq!(of(Some(64 << 10), Some(1 << 10)), 1 << 20);
    }
}
