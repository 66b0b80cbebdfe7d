//! The buckets of the histograms of statement times.

/// Number of finite histogram buckets for statement times. The first bound is 16 us, and each
/// further one is twice the previous.
pub(crate) const BUCKETS: usize = 21;
const FIRST_BUCKET_US: u64 = 16;

/// The first bucket whose upper bound is at least `time_us`.
pub(crate) fn bucket(time_us: u64) -> usize {
    let units = time_us.div_ceil(FIRST_BUCKET_US).max(1);
    ((units - 1).checked_ilog2().map_or(0, |log| log + 1) as usize).min(BUCKETS)
}

/// The upper bound of a bucket in microseconds.
pub(crate) fn bucket_bound_us(bucket: usize) -> u64 {
    FIRST_BUCKET_US << bucket
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_match_their_bounds() {
        assert_eq!([0, 1, 16, 17, 32, 33, 64].map(bucket), [0, 0, 0, 1, 1, 2, 2]);
        assert_eq!(bucket(16 << 20), 20);
        assert_eq!(bucket((16 << 20) + 1), BUCKETS);
        assert_eq!(bucket(u64::MAX), BUCKETS);
    }
}
