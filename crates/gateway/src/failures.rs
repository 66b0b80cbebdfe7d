//! Logins that failed, and how they slow down those that come next.
//!
//! Who guesses passwords has to wait for each answer, the right one too: 100 ms after the first failure for a user, twice as
//! long after each further one, up to 5 s; and the same for an address, whoever it logs in as. An address may stand for many
//! clients, so it has a few failures free. A minute without a failure, and all is forgotten.
//!
//! ```text
//!   proof of a password --> wait: the longer of user's and address's --> check --> wrong: note it for both
//! ```
//!
//! Names count as they are said, whether there is such a user or not, so nobody learns which there are. Nothing is held while
//! a client waits but its connection. The table is bounded: when it is full, who failed the longest ago is forgotten.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// What the first failure that counts costs.
const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(5);
/// How long nothing may fail until it is forgotten.
const PEACE: Duration = Duration::from_secs(60);
/// Failures of an address that cost nothing.
const FREE_OF_ADDRESS: u32 = 10;
/// Users and addresses that are remembered at most.
const REMEMBERED: usize = 10_000;

/// Who failed.
#[derive(Clone, Copy)]
pub(crate) struct Who<'a> {
    /// `None` for who came with a token: it names nobody.
    pub(crate) user: Option<&'a str>,
    /// `None` if it is not known.
    pub(crate) address: Option<IpAddr>,
}

/// The failures of one user or address.
struct Failed {
    times: u32,
    last: Instant,
}

/// The logins that failed lately.
pub(crate) struct Failures {
    /// By a hash that nobody can foresee: a name may be long.
    table: Mutex<HashMap<u64, Failed>>,
    hash: RandomState,
}

impl Failures {
    pub(crate) fn new() -> Failures {
        Failures { table: Mutex::default(), hash: RandomState::new() }
    }

    /// How long the next answer has to wait.
    pub(crate) fn delay(&self, who: Who<'_>, now: Instant) -> Duration {
        let table = self.table.lock();
        let delay = |(key, free): (u64, u32)| {
            let failed = table.get(&key).filter(|failed| now.saturating_duration_since(failed.last) < PEACE);
            failed.map_or(Duration::ZERO, |failed| delay_after(failed.times.saturating_sub(free)))
        };
        self.keys(who).map(delay).max().unwrap_or_default()
    }

    /// A login has failed.
    pub(crate) fn note(&self, who: Who<'_>, now: Instant) {
        let mut table = self.table.lock();
        for (key, _) in self.keys(who) {
            if table.len() >= REMEMBERED && !table.contains_key(&key) {
                make_room(&mut table, now);
            }
            let failed = table.entry(key).or_insert(Failed { times: 0, last: now });
            if now.saturating_duration_since(failed.last) >= PEACE {
                failed.times = 0;
            }
            failed.times = failed.times.saturating_add(1);
            failed.last = now;
        }
    }

    /// What counts, and how many failures of each are free.
    fn keys(&self, who: Who<'_>) -> impl Iterator<Item = (u64, u32)> {
        let user = who.user.map(|user| (self.hash.hash_one((0, user)), 0));
        let address = who.address.map(|address| (self.hash.hash_one((1, site(address))), FREE_OF_ADDRESS));
        user.into_iter().chain(address)
    }
}

/// What stands for all addresses that one client can easily have: with IPv6 those are the lower 64 bits.
fn site(address: IpAddr) -> u128 {
    match address.to_canonical() {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits() & !u128::from(u64::MAX),
    }
}

fn delay_after(failures: u32) -> Duration {
    match failures {
        0 => Duration::ZERO,
        _ => FIRST_DELAY.saturating_mul(2_u32.saturating_pow(failures - 1)).min(LONGEST_DELAY),
    }
}

/// Forgets what is over; if nothing is, who failed the longest ago.
fn make_room(table: &mut HashMap<u64, Failed>, now: Instant) {
    table.retain(|_, failed| now.saturating_duration_since(failed.last) < PEACE);
    if table.len() >= REMEMBERED
        && let Some(oldest) = table.iter().min_by_key(|(_, failed)| failed.last).map(|(key, _)| *key)
    {
        table.remove(&oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who<'a>(user: &'a str, address: &str) -> Who<'a> {
        Who { user: Some(user), address: Some(address.parse().unwrap()) }
    }

    #[test]
    fn each_failure_doubles_the_wait_up_to_a_bound_until_there_is_peace() {
        let (failures, start) = (Failures::new(), Instant::now());
        let mut delays = Vec::new();
        for _ in 0..8 {
            delays.push(failures.delay(who("anna", "10.0.0.1"), start).as_millis());
            failures.note(who("anna", "10.0.0.1"), start);
        }
        assert_eq!(delays, [0, 100, 200, 400, 800, 1600, 3200, 5000]);
        for _ in 0..100 {
            failures.note(who("anna", "10.0.0.1"), start);
        }
        assert_eq!(failures.delay(who("anna", "10.0.0.2"), start), LONGEST_DELAY, "from elsewhere, too");
        assert_eq!(failures.delay(who("bert", "10.0.0.2"), start), Duration::ZERO);
        assert_eq!(failures.delay(who("anna", "10.0.0.1"), start + PEACE), Duration::ZERO);
        failures.note(who("anna", "10.0.0.1"), start + PEACE);
        assert_eq!(failures.delay(who("anna", "10.0.0.1"), start + PEACE), FIRST_DELAY);
    }

    #[test]
    fn an_address_is_slowed_down_whoever_it_says_it_is() {
        let (failures, now) = (Failures::new(), Instant::now());
        let names: Vec<String> = (0..=FREE_OF_ADDRESS).map(|n| format!("u{n}")).collect();
        for name in &names {
            assert_eq!(failures.delay(who("new", "2001:db8::1"), now), Duration::ZERO);
            failures.note(who(name, "2001:db8::1"), now);
        }
        assert_eq!(failures.delay(who("new", "2001:db8::1"), now), FIRST_DELAY);
        assert_eq!(failures.delay(who("new", "2001:db8::ffff:2"), now), FIRST_DELAY, "the same network");
        assert_eq!(failures.delay(who("new", "2001:db8:0:1::1"), now), Duration::ZERO);
        assert_eq!(failures.delay(Who { user: Some("new"), address: None }, now), Duration::ZERO);
    }

    #[test]
    fn the_table_is_bounded_and_forgets_the_oldest() {
        let (failures, start) = (Failures::new(), Instant::now());
        let user = |name: &str, second: u64| {
            failures.note(Who { user: Some(name), address: None }, start + Duration::from_millis(second));
        };
        user("first", 0);
        user("second", 1);
        for n in 0..REMEMBERED as u64 - 1 {
            user(&n.to_string(), 2 + n % 1000);
        }
        assert_eq!(failures.table.lock().len(), REMEMBERED);
        let delay =
            |user| failures.delay(Who { user: Some(user), address: None }, start + Duration::from_secs(2));
        assert_eq!((delay("first"), delay("second")), (Duration::ZERO, FIRST_DELAY));
        failures.note(Who { user: Some("late"), address: None }, start + 2 * PEACE);
        assert_eq!(failures.table.lock().len(), 1);
    }
}
