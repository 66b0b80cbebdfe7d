//! Runs the load on a dedicated thread with one event loop for all connections.
//!
//! The caller's runtime may be busy with other work, such as the display of a demo or other
//! servers, which would distort the measurement. On a single-threaded event loop no wake-up of a
//! connection crosses CPUs, and the thread's CPU time is exactly the cost of the load.

use std::future::Future;
use std::time::Duration;

use anyhow::Context;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::oneshot;
use tokio::task::LocalSet;

/// Runs `work` on a new thread. Dropping the returned future drops the work, including its
/// connections.
pub(crate) async fn run_on_driver_thread<T, W, F>(work: W) -> anyhow::Result<T>
where
    T: Send + 'static,
    W: FnOnce() -> F + Send + 'static,
    F: Future<Output = anyhow::Result<T>> + 'static,
{
    let (sender, receiver) = oneshot::channel();
    std::thread::Builder::new()
        .name("fulmar-driver".to_owned())
        .spawn(move || drive(work, sender))
        .context("could not start driver thread")?;
    receiver.await.context("driver thread ended without a result")?
}

fn drive<T, W, F>(work: W, mut result: oneshot::Sender<anyhow::Result<T>>)
where
    W: FnOnce() -> F,
    F: Future<Output = anyhow::Result<T>> + 'static,
{
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        // If the receiver is gone, the result is not needed. The same applies below.
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

/// Sets the calling thread to `SCHED_IDLE`, so that it gets little more than the CPU time that no
/// other thread wants. A niced thread would still finish its time slice of some milliseconds when
/// another thread wakes up.
#[expect(unsafe_code, reason = "no dependency wraps sched_setscheduler")]
pub(crate) fn use_idle_priority() -> anyhow::Result<()> {
    let parameter = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call only reads the parameter, and changes only the scheduling of this thread.
    let outcome = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameter) };
    match outcome {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()).context("could not set driver thread to SCHED_IDLE"),
    }
}

/// The user and system CPU time of the calling thread.
pub(crate) fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn results_and_errors_are_returned() {
        assert_eq!(run_on_driver_thread(|| async { Ok(7) }).await.unwrap(), 7);
        let failed: anyhow::Result<()> = run_on_driver_thread(|| async { anyhow::bail!("no") }).await;
        assert_eq!(failed.unwrap_err().to_string(), "no");
    }

    #[tokio::test]
    async fn dropping_the_future_drops_the_work() {
        let (held, released) = oneshot::channel::<()>();
        let (started, running) = oneshot::channel();
        let work = run_on_driver_thread(move || async move {
            let _held = held;
            started.send(()).unwrap();
            std::future::pending::<anyhow::Result<()>>().await
        });
        tokio::select! {
            _ = work => unreachable!("the work never completes"),
            started = running => started.unwrap(),
        }
        assert!(released.await.is_err(), "the work must be dropped with its captures");
    }
}
