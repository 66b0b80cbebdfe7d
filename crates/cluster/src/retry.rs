//! Pauses between attempts.

use std::time::Duration;

use crate::environment::Environment;

/// Minimum pause between two attempts of a failed request.
const MIN_PAUSE: Duration = Duration::from_millis(20);

/// Waits before the next attempt.
pub(crate) async fn pause<E: Environment>(env: &E) {
    env.sleep(MIN_PAUSE + env.jitter(MIN_PAUSE)).await;
}
