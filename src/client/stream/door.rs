//! Where a front door is, from its base URL.

use hyper::Uri;

use crate::failure::Failure;

/// The address of a front door.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Door {
    host: String,
    port: u16,
    /// As it stands in the URL: the `host` header.
    authority: String,
    /// What stands before every path.
    prefix: String,
}

impl Door {
    /// Of `http://HOST:PORT`, with or without a path behind it.
    ///
    /// # Errors
    /// Environment: it is another kind of address, https among them.
    pub(super) fn new(base_url: &str) -> Result<Self, Failure> {
        let refused = |hint: &str| {
            Failure::environment("the front door's address cannot be streamed from")
                .expected("http://HOST:PORT")
                .found(base_url)
                .hint(hint)
        };
        let uri: Uri = base_url
            .parse()
            .map_err(|_| refused("correct the address"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(refused(
                    "latencies are taken at the socket, where TLS hides the frames: use the front door's plain port",
                ));
            }
            _ => return Err(refused("correct the address")),
        }
        let authority = uri
            .authority()
            .ok_or_else(|| refused("correct the address"))?;
        if authority.as_str().contains('@') {
            return Err(refused("leave user and password out: none are sent"));
        }
        let host = authority.host().trim_matches(['[', ']']);
        if host.is_empty() {
            return Err(refused("correct the address"));
        }
        Ok(Self {
            host: host.to_owned(),
            port: authority.port_u16().unwrap_or(80),
            authority: authority.as_str().to_owned(),
            prefix: uri.path().trim_end_matches('/').to_owned(),
        })
    }

    /// Name or address, an IPv6 one without brackets.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// For the `host` header.
    pub(super) fn authority(&self) -> &str {
        &self.authority
    }

    /// The target of a request for `path`.
    pub(super) fn target(&self, path: &str) -> String {
        format!("{}{path}", self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_a_port() {
        for (url, host, port, authority, target) in [
            (
                "http://127.0.0.1:8000",
                "127.0.0.1",
                8000,
                "127.0.0.1:8000",
                "/v1",
            ),
            (
                "http://127.0.0.1:8000/",
                "127.0.0.1",
                8000,
                "127.0.0.1:8000",
                "/v1",
            ),
            ("http://node-3", "node-3", 80, "node-3", "/v1"),
            ("http://[::1]:9/a/", "::1", 9, "[::1]:9", "/a/v1"),
        ] {
            let door = Door::new(url).unwrap();
            assert_eq!((door.host(), door.port()), (host, port), "{url}");
            assert_eq!(door.authority(), authority);
            assert_eq!(door.target("/v1"), target);
        }
    }

    #[test]
    fn other_addresses_are_refused_in_words() {
        for url in [
            "https://host:8000",
            "host:8000",
            "/v1",
            "",
            "ftp://host",
            "http://a@host",
            "http://:80",
        ] {
            let failure = Door::new(url).unwrap_err().to_string();
            assert!(
                failure.starts_with("Environment: the front door's address"),
                "{failure}"
            );
            assert!(failure.contains("expected http://HOST:PORT"), "{failure}");
        }
        let tls = Door::new("https://host:8000").unwrap_err().to_string();
        assert!(tls.contains("plain port"), "{tls}");
    }
}
