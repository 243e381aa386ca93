//! Error answers, in Dynamo's shape.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An answer that is an error.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Refusal {
    pub(super) status: u16,
    pub(super) message: String,
    /// What a program can read of it.
    details: Option<Value>,
}

impl Refusal {
    fn new(status: u16, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            details: None,
        }
    }

    /// The request cannot be served as it is.
    pub(super) fn bad(message: String) -> Self {
        Self::new(400, message)
    }

    /// The prompt leaves no room for an answer.
    pub(super) fn too_long(limit: u32, actual: usize) -> Self {
        Self {
            details: Some(json!({"type": "context_length", "limit": limit, "actual": actual})),
            ..Self::new(400, "Invalid request")
        }
    }

    /// A pin to an instance that is not registered.
    pub(super) fn unknown_pin() -> Self {
        Self::new(400, "Invalid request")
    }

    /// No engine serves the model.
    pub(super) fn no_model() -> Self {
        Self::new(404, "Model not found")
    }

    /// A worker that is listed and cannot be reached.
    pub(super) fn unavailable() -> Self {
        Self::new(503, "Service temporarily unavailable")
    }

    /// An engine broke off.
    pub(super) fn failed() -> Self {
        Self::new(500, "Failed to generate completions")
    }

    /// What an engine itself says.
    pub(super) fn engine(status: u16, message: String) -> Self {
        Self::new(status, message)
    }

    /// The header that pins a worker names none that may be pinned in a disaggregated deployment.
    pub(super) fn not_eligible(id: u64) -> Self {
        Self::new(500, format!("Pinned worker {id} not eligible"))
    }

    /// The error document.
    pub(super) fn document(&self) -> Value {
        let kind = match self.status {
            400 => "Bad Request",
            404 => "Not Found",
            503 => "Service Unavailable",
            _ => "Internal Server Error",
        };
        let mut document = json!({"message": self.message, "type": kind, "code": self.status});
        if let Some(details) = &self.details {
            document["details"] = details.clone();
        }
        document
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(self.document())).into_response()
    }
}
