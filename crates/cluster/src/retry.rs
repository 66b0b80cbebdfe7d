//! Pauses between attempts.

use std::time::Duration;

use crate::environment::Environment;

/// The shortest pause between two attempts of a request that failed.
const PAUSE: Duration = Duration::from_millis(20);

/// Waits before the next attempt.
pub(crate) async fn pause<E: Environment>(env: &E) {
    env.sleep(PAUSE + env.jitter(PAUSE)).await;
}
