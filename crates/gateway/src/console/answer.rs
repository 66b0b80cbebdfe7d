//! Error responses of the API: a status, and JSON with the parts of PostgreSQL's errors.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::sql::SqlError;
use crate::tokens::AuthorizationError;

/// Why a request failed.
#[derive(Debug)]
pub(super) struct Failure {
    status: StatusCode,
    error: SqlError,
}

#[derive(Serialize)]
struct Body<'a> {
    error: &'a SqlError,
}

impl Failure {
    fn new(status: StatusCode, message: impl Into<String>, hint: &str) -> Failure {
        let error = SqlError { message: message.into(), hint: Some(hint.to_owned()), ..SqlError::default() };
        Failure { status, error }
    }

    /// The statement did not end in time.
    pub(super) fn timed_out() -> Failure {
        Failure::new(
            StatusCode::GATEWAY_TIMEOUT,
            "the node did not answer in time",
            "Check that the nodes of the cluster respond, and retry.",
        )
    }

    /// The name of the database was given to another one since the page has read it.
    pub(super) fn replaced(database: &str) -> Failure {
        Failure::new(
            StatusCode::CONFLICT,
            format!("database \"{database}\" is not the one that the page shows"),
            "Another database has this name now. Check its page, and retry.",
        )
    }

    /// The limit of concurrent requests is reached.
    pub(super) fn busy() -> Failure {
        Failure::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many concurrent requests of consoles",
            "Close other consoles of this node, or retry.",
        )
    }

    /// The node shuts down.
    pub(super) fn closing() -> Failure {
        Failure::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "the node is shutting down",
            "Open the console of another node.",
        )
    }

    /// The body is too large, or did not arrive completely.
    pub(super) fn too_large(max_bytes: usize) -> Failure {
        Failure::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "the request's body is incomplete or too large",
            &format!("Send at most {max_bytes} bytes."),
        )
    }

    /// The body or a name in it is invalid.
    pub(super) fn invalid(problem: impl Into<String>) -> Failure {
        Failure::new(StatusCode::BAD_REQUEST, problem, "The module console::actions lists the requests.")
    }
}

impl From<AuthorizationError> for Failure {
    fn from(error: AuthorizationError) -> Failure {
        const CREATE: &str = "A superuser creates one with CREATE TOKEN name FOR ADMIN.";
        match error {
            AuthorizationError::Missing => Failure::new(StatusCode::UNAUTHORIZED, "token required", CREATE),
            AuthorizationError::Unknown => {
                Failure::new(StatusCode::UNAUTHORIZED, "token unknown or expired", CREATE)
            }
            AuthorizationError::NotAdmin => {
                Failure::new(StatusCode::FORBIDDEN, "this token only shows metrics", CREATE)
            }
            AuthorizationError::TooManyFailures => Failure::new(
                StatusCode::TOO_MANY_REQUESTS,
                "too many invalid tokens from this address",
                "Retry after one minute.",
            ),
        }
    }
}

impl From<SqlError> for Failure {
    fn from(error: SqlError) -> Failure {
        Failure { status: StatusCode::UNPROCESSABLE_ENTITY, error }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(Body { error: &self.error })).into_response();
        if self.status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
        }
        response
    }
}
