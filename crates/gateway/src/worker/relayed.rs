//! Sessions of fronts at the worker of the current thread.
//!
//! Fronts ([`crate::relay`]) are served by workers, and some start a session at their own worker. So
//! that the relay does not depend on workers, a worker registers a function that starts the session.

use std::cell::RefCell;
use std::rc::Rc;

use tokio::io::DuplexStream;

use crate::relay::SessionHello;

/// Starts a session of a front.
pub(super) type Serve = dyn Fn(SessionHello, DuplexStream);

thread_local! {
    /// The function of this thread's worker.
    static SERVE: RefCell<Option<Rc<Serve>>> = const { RefCell::new(None) };
}

/// Sets the function of this thread's worker.
pub(super) fn set(serve: Option<Rc<Serve>>) {
    SERVE.set(serve);
}

/// Serves a session of a front of this worker, at the same worker. Outside of a worker, the pipe is
/// closed.
pub(crate) fn serve_relayed_here(hello: SessionHello, pipe: DuplexStream) {
    let serve = SERVE.with_borrow(Clone::clone);
    if let Some(serve) = serve {
        serve(hello, pipe);
    }
}
