//! A thread of its own for the load: one event loop for all connections.
//!
//! The caller's runtime may be busy with anything (a demo's display, other servers); load that shared it would measure
//! that too. On a single-threaded loop no connection's wake-up crosses a core, and the thread's CPU time is exactly
//! what the load cost.

use std::future::Future;
use std::time::Duration;

use anyhow::Context;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::oneshot;
use tokio::task::LocalSet;

/// Runs `work` on a thread of its own. If the returned future is dropped, so is the work, connections and all.
pub(crate) async fn on_own_thread<T, W, F>(work: W) -> anyhow::Result<T>
where
    T: Send + 'static,
    W: FnOnce() -> F + Send + 'static,
    F: Future<Output = anyhow::Result<T>> + 'static,
{
    let (sender, receiver) = oneshot::channel();
    std::thread::Builder::new()
        .name("fulmar-driver".to_owned())
        .spawn(move || drive(work, sender))
        .context("cannot start the driver's thread")?;
    receiver.await.context("the driver's thread ended without a result")?
}

fn drive<T, W, F>(work: W, mut result: oneshot::Sender<anyhow::Result<T>>)
where
    W: FnOnce() -> F,
    F: Future<Output = anyhow::Result<T>> + 'static,
{
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        // A receiver that is gone needs no answer, here and below.
        Err(error) => return drop(result.send(Err(error.into()))),
    };
    let outcome = LocalSet::new().block_on(&runtime, async {
        tokio::select! {
            outcome = work() => Some(outcome),
            () = result.closed() => None,
        }
    });
    if let Some(outcome) = outcome {
        drop(result.send(outcome));
    }
}

/// Lets all other threads of the machine go first: from now on the calling one gets hardly more than what nobody else wants. (One that is merely
/// nice goes on to the end of its slice, some milliseconds, when another one wakes up.)
#[expect(unsafe_code, reason = "no library that we have wraps it")]
pub(crate) fn give_way() -> anyhow::Result<()> {
    let parameter = libc::sched_param { sched_priority: 0 };
    // SAFETY: the parameter is read, and what it changes is how the calling thread is scheduled.
    let outcome = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameter) };
    match outcome {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()).context("cannot set the driver's priority"),
    }
}

/// CPU time, user and system, that the calling thread has used.
pub(crate) fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn results_and_errors_come_back() {
        assert_eq!(on_own_thread(|| async { Ok(7) }).await.unwrap(), 7);
        let failed: anyhow::Result<()> = on_own_thread(|| async { anyhow::bail!("no") }).await;
        assert_eq!(failed.unwrap_err().to_string(), "no");
    }

    #[tokio::test]
    async fn dropping_the_future_drops_the_work() {
        let (held, released) = oneshot::channel::<()>();
        let (started, running) = oneshot::channel();
        let work = on_own_thread(move || async move {
            let _held = held;
            started.send(()).unwrap();
            std::future::pending::<anyhow::Result<()>>().await
        });
        tokio::select! {
            _ = work => unreachable!("the work never ends by itself"),
            started = running => started.unwrap(),
        }
        assert!(released.await.is_err(), "the work, and what it held, is gone");
    }
}
