//! Login throttling: failed logins delay the next attempts.
//!
//! After a failed login, every further attempt is delayed before its proof is checked, including a
//! correct one. The delay is 100 ms after the first failure, doubles with every further failure,
//! and is at most 5 s. Failures are counted per user, and separately per address for all users. An
//! address may be shared by many clients, so its first 10 failures do not count. Counters expire
//! 60 s after the last failure.
//!
//! ```text
//!   proof of a password --> wait: longer delay of user, address --> check --> wrong: record it
//!                            ^                                        |
//!                            `--- a login of this address and user ---´
//!                                 has failed: wait from then on
//! ```
//!
//! Parallel guesses are as slow as sequential ones. A check and the recording of its failure are
//! one step under the lock of the table. The lock is held for a few microseconds, since the client
//! does the expensive part of the password computation. Of all attempts whose delay ends at the
//! same time, one is checked. If it fails, the others see the new failure and wait again, counted
//! from that failure. If it succeeds, the others are checked immediately. Without recent failures
//! nothing is delayed, so an application can open all its connections concurrently.
//!
//! Only failures of the same address *and* user restart the wait of an attempt that is already
//! waiting. Other failures extend the delay up to 5 s, counted from the attempt's arrival.
//! Otherwise an attacker who guesses continuously from elsewhere could lock out the user. The
//! consequences:
//!
//! - An attacker with many addresses gets one guess per address every 5 s.
//! - A user who shares an address with an attacker guessing that user's password waits in line with
//!   the attacker, and is rejected when the wait would exceed 30 s.
//!
//! User names are counted whether or not the user exists, so that the delays do not reveal which
//! names exist. A waiting attempt holds only its connection, and connections are limited
//! ([`crate::connection_slots`]). The table is bounded: when it is full, the entry whose last
//! failure is oldest is evicted.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// The delay after the first failure that counts.
const FIRST_DELAY: Duration = Duration::from_millis(100);
const MAX_DELAY: Duration = Duration::from_secs(5);
/// Attempts that would have to wait longer are rejected.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Failures expire after this time without a further failure.
const FAILURE_TTL: Duration = Duration::from_secs(60);
/// Failures of an address that do not count.
const FREE_ATTEMPTS_PER_ADDRESS: u32 = 10;
/// Maximum number of entries: users, addresses, and pairs of them.
const MAX_ENTRIES: usize = 30_000;

/// The origin of a login attempt.
#[derive(Clone, Copy)]
pub(crate) struct LoginOrigin<'a> {
    /// `None` for a token, which names no user.
    pub(crate) user: Option<&'a str>,
    /// `None` if unknown.
    pub(crate) address: Option<IpAddr>,
}

/// The failures of a user, of an address, or of a pair.
struct FailureCount {
    times: u32,
    last: Instant,
}

/// Keyed by a hash with a random seed, since names may be long.
type Table = HashMap<u64, FailureCount>;

/// The recent failed logins.
pub(crate) struct LoginThrottle {
    table: Mutex<Table>,
    hash: RandomState,
}

/// The wait would be too long, because too many attempts have failed.
#[derive(Debug)]
pub(crate) struct TooManyFailures;

/// The right to check one proof. It holds the lock of the table: hold it only for the check.
pub(crate) struct AttemptSlot<'a> {
    throttle: &'a LoginThrottle,
    table: MutexGuard<'a, Table>,
    origin: LoginOrigin<'a>,
}

impl AttemptSlot<'_> {
    /// Records that the proof was wrong.
    pub(crate) fn failed(mut self, now: Instant) {
        let AttemptSlot { throttle, table, origin } = &mut self;
        let throttle_keys = throttle.throttle_keys(*origin).map(|(key, _)| key);
        for key in throttle_keys.chain([throttle.pair_key(*origin)]) {
            record_failure(table, key, now);
        }
    }
}

impl LoginThrottle {
    pub(crate) fn new() -> LoginThrottle {
        LoginThrottle { table: Mutex::default(), hash: RandomState::new() }
    }

    /// Waits until a proof may be checked.
    pub(crate) async fn wait_for_slot<'a>(
        &'a self,
        origin: LoginOrigin<'a>,
    ) -> Result<AttemptSlot<'a>, TooManyFailures> {
        let arrived = Instant::now();
        loop {
            let ready = match self.try_slot(origin, arrived, Instant::now()) {
                Ok(attempt) => return Ok(attempt),
                Err(ready) => ready,
            };
            if ready.saturating_duration_since(arrived) > MAX_WAIT {
                return Err(TooManyFailures);
            }
            tokio::time::sleep_until(ready.into()).await;
        }
    }

    /// The turn of an attempt that arrived at `arrived`, or the time to try again.
    fn try_slot<'a>(
        &'a self,
        origin: LoginOrigin<'a>,
        arrived: Instant,
        now: Instant,
    ) -> Result<AttemptSlot<'a>, Instant> {
        let table = self.table.lock();
        let recent = |key: u64| {
            table.get(&key).filter(|failed| now.saturating_duration_since(failed.last) < FAILURE_TTL)
        };
        let delays = self.throttle_keys(origin).filter_map(|(key, free)| {
            recent(key).map(|failed| delay_after(failed.times.saturating_sub(free)))
        });
        let delay = delays.max().unwrap_or_default();
        let since = recent(self.pair_key(origin)).map_or(arrived, |failed| failed.last.max(arrived));
        let ready = since + delay;
        if ready > now {
            return Err(ready);
        }
        Ok(AttemptSlot { throttle: self, table, origin })
    }

    /// The keys under which failures count, with the number of failures that do not count for each.
    fn throttle_keys(&self, origin: LoginOrigin<'_>) -> impl Iterator<Item = (u64, u32)> {
        let user = origin.user.map(|user| (self.hash.hash_one((0, user)), 0));
        let address = origin
            .address
            .map(|address| (self.hash.hash_one((1, network(address))), FREE_ATTEMPTS_PER_ADDRESS));
        user.into_iter().chain(address)
    }

    /// The key of the attempts that wait for each other.
    fn pair_key(&self, origin: LoginOrigin<'_>) -> u64 {
        self.hash.hash_one((2, origin.user, origin.address.map(network)))
    }
}

fn record_failure(table: &mut Table, key: u64, now: Instant) {
    if table.len() >= MAX_ENTRIES && !table.contains_key(&key) {
        evict(table, now);
    }
    let failed = table.entry(key).or_insert(FailureCount { times: 0, last: now });
    if now.saturating_duration_since(failed.last) >= FAILURE_TTL {
        failed.times = 0;
    }
    failed.times = failed.times.saturating_add(1);
    failed.last = now;
}

/// The network of an address: a client can easily use all addresses with the same upper 64 bits of
/// an IPv6 address.
fn network(address: IpAddr) -> u128 {
    match address.to_canonical() {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits() & !u128::from(u64::MAX),
    }
}

fn delay_after(throttle: u32) -> Duration {
    match throttle {
        0 => Duration::ZERO,
        _ => FIRST_DELAY.saturating_mul(2_u32.saturating_pow(throttle - 1)).min(MAX_DELAY),
    }
}

/// Removes the expired entries. If there are none, removes the entry whose last failure is oldest.
fn evict(table: &mut Table, now: Instant) {
    table.retain(|_, failed| now.saturating_duration_since(failed.last) < FAILURE_TTL);
    if table.len() >= MAX_ENTRIES
        && let Some(oldest) = table.iter().min_by_key(|(_, failed)| failed.last).map(|(key, _)| *key)
    {
        table.remove(&oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin<'a>(user: &'a str, address: &str) -> LoginOrigin<'a> {
        LoginOrigin { user: Some(user), address: Some(address.parse().unwrap()) }
    }

    fn without_address(user: &str) -> LoginOrigin<'_> {
        LoginOrigin { user: Some(user), address: None }
    }

    /// The delay of an attempt that arrives now.
    fn delay(throttle: &LoginThrottle, origin: LoginOrigin<'_>, now: Instant) -> Duration {
        throttle.try_slot(origin, now, now).err().map_or(Duration::ZERO, |ready| ready - now)
    }

    /// A wrong proof, after its delay.
    fn fail(throttle: &LoginThrottle, origin: LoginOrigin<'_>, now: Instant) {
        throttle.try_slot(origin, now - MAX_DELAY, now).ok().unwrap().failed(now);
    }

    #[test]
    fn each_failure_doubles_the_delay_up_to_a_limit_until_it_expires() {
        let throttle = LoginThrottle::new();
        let mut now = Instant::now() + FAILURE_TTL;
        let mut delays = Vec::new();
        for _ in 0..8 {
            let delay = delay(&throttle, origin("anna", "10.0.0.1"), now);
            delays.push(delay.as_millis());
            now += delay;
            fail(&throttle, origin("anna", "10.0.0.1"), now);
        }
        assert_eq!(delays, [0, 100, 200, 400, 800, 1600, 3200, 5000]);
        for _ in 0..100 {
            now += MAX_DELAY;
            fail(&throttle, origin("anna", "10.0.0.1"), now);
        }
        assert_eq!(
            delay(&throttle, origin("anna", "10.0.0.2"), now),
            MAX_DELAY,
            "the delay of a user applies to all addresses"
        );
        assert_eq!(delay(&throttle, origin("bert", "10.0.0.2"), now), Duration::ZERO);
        assert_eq!(delay(&throttle, origin("anna", "10.0.0.1"), now + FAILURE_TTL), Duration::ZERO);
        fail(&throttle, origin("anna", "10.0.0.1"), now + FAILURE_TTL);
        assert_eq!(delay(&throttle, origin("anna", "10.0.0.1"), now + FAILURE_TTL), FIRST_DELAY);
    }

    /// The times in milliseconds at which `attempts` simultaneous attempts are checked, in order,
    /// within 30 s.
    fn check_times(
        throttle: &LoginThrottle,
        attempts: usize,
        origin: LoginOrigin<'_>,
        start: Instant,
        right: bool,
    ) -> Vec<u128> {
        let (mut check_times, mut waiting) = (Vec::new(), vec![start; attempts]);
        while let Some(next) = waiting.iter().min().copied().filter(|next| *next <= start + MAX_WAIT) {
            for place in (0..waiting.len()).rev().filter(|place| waiting[*place] == next).collect::<Vec<_>>()
            {
                match throttle.try_slot(origin, start, next) {
                    Err(ready) => waiting[place] = ready,
                    Ok(attempt) => {
                        if !right {
                            attempt.failed(next);
                        }
                        check_times.push((next - start).as_millis());
                        waiting.swap_remove(place);
                    }
                }
            }
        }
        check_times
    }

    #[test]
    fn parallel_guesses_are_as_slow_as_sequential_ones() {
        let (throttle, start) = (LoginThrottle::new(), Instant::now());
        let wrong = check_times(&throttle, 100, origin("anna", "10.0.0.1"), start, false);
        assert_eq!(wrong, [0, 100, 300, 700, 1500, 3100, 6300, 11300, 16300, 21300, 26300]);
        // Guessing tokens, which name no user, is as slow after the free attempts of the address.
        let tokens = LoginOrigin { user: None, address: Some("10.0.0.2".parse().unwrap()) };
        let wrong = check_times(&throttle, 100, tokens, start, false);
        assert_eq!(wrong[..13], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 100, 300]);
    }

    #[test]
    fn parallel_correct_logins_do_not_wait_for_each_other() {
        let (throttle, start) = (LoginThrottle::new(), Instant::now());
        assert_eq!(check_times(&throttle, 100, origin("anna", "10.0.0.1"), start, true), [0; 100]);
        throttle.try_slot(origin("anna", "10.0.0.1"), start, start).ok().unwrap().failed(start);
        assert_eq!(check_times(&throttle, 100, origin("anna", "10.0.0.1"), start, true), [100; 100]);
    }

    #[test]
    fn failures_from_another_address_do_not_lock_out_a_user() {
        let (throttle, start) = (LoginThrottle::new(), Instant::now());
        let mut now = start;
        for _ in 0..7 {
            while let Err(ready) = throttle.try_slot(origin("anna", "10.0.0.2"), start, now) {
                now = ready;
            }
            fail(&throttle, origin("anna", "10.0.0.2"), now);
        }
        let waits = |address| throttle.try_slot(origin("anna", address), start, now).err();
        assert!(now > start + MAX_DELAY);
        assert_eq!(waits("10.0.0.1"), None, "failures from other addresses must not restart the wait");
        assert_eq!(waits("10.0.0.2"), Some(now + MAX_DELAY));
    }

    #[test]
    fn an_address_is_delayed_for_all_user_names() {
        let (throttle, now) = (LoginThrottle::new(), Instant::now() + FAILURE_TTL);
        let names: Vec<String> = (0..=FREE_ATTEMPTS_PER_ADDRESS).map(|n| format!("u{n}")).collect();
        for name in &names {
            assert_eq!(delay(&throttle, origin("new", "2001:db8::1"), now), Duration::ZERO);
            fail(&throttle, origin(name, "2001:db8::1"), now);
        }
        assert_eq!(delay(&throttle, origin("new", "2001:db8::1"), now), FIRST_DELAY);
        assert_eq!(
            delay(&throttle, origin("new", "2001:db8::ffff:2"), now),
            FIRST_DELAY,
            "addresses of one /64 network share a counter"
        );
        assert_eq!(delay(&throttle, origin("new", "2001:db8:0:1::1"), now), Duration::ZERO);
        assert_eq!(delay(&throttle, LoginOrigin { user: Some("new"), address: None }, now), Duration::ZERO);
    }

    #[test]
    fn full_table_evicts_the_oldest_entry() {
        let (throttle, start) = (LoginThrottle::new(), Instant::now() + FAILURE_TTL);
        let user =
            |name: &str, ms: u64| fail(&throttle, without_address(name), start + Duration::from_millis(ms));
        user("first", 0);
        user("second", 1);
        // Each name has two entries: the user's, and that of the pair with the (unknown) address.
        for n in 0..MAX_ENTRIES as u64 / 2 - 1 {
            user(&n.to_string(), 2 + n % 1000);
        }
        assert_eq!(throttle.table.lock().len(), MAX_ENTRIES);
        let delay = |user| delay(&throttle, without_address(user), start + Duration::from_secs(2));
        assert_eq!((delay("first"), delay("second")), (Duration::ZERO, FIRST_DELAY));
        fail(&throttle, without_address("late"), start + 2 * FAILURE_TTL);
        assert_eq!(throttle.table.lock().len(), 2);
    }
}
