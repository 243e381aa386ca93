//! What was measured, and what is claimed of it.

use comfy_table::{CellAlignment, Table, presets};

use crate::clients::Client;
use crate::outputs::{Errors, quantile};
use crate::report::Claim;
use crate::server::TOKENS;

/// Where the claims are made, and where cost has to be linear still.
const AT: usize = 256;
const MOST: usize = 1000;

/// One load of one client.
pub(crate) struct Row {
    pub(crate) client: Client,
    pub(crate) count: usize,
    /// Seconds of user and system time, its start included.
    pub(crate) cpu_s: f64,
    pub(crate) errors: Errors,
}

impl Row {
    fn tokens(&self) -> f64 {
        (self.count * TOKENS) as f64
    }

    /// Whether every stream came to its end.
    fn is_whole(&self) -> bool {
        self.errors.ttft_ms.len() == self.count
    }

    /// Infinite where a stream is missing: what failed early is no quick one.
    fn ttft_ms(&self, share: f64) -> f64 {
        let found = quantile(&self.errors.ttft_ms, share);
        found.filter(|_| self.is_whole()).unwrap_or(f64::INFINITY)
    }
}

/// Microseconds of CPU for each token: all that the client took, its start included.
fn cost_us(row: &Row) -> f64 {
    match row.is_whole() {
        true => row.cpu_s * 1e6 / row.tokens(),
        false => f64::INFINITY,
    }
}

/// The same for what a load took more than that of one stream did, which is what the client needs
/// to start. Where starting takes seconds, this is the small difference of large numbers.
fn beyond_start_us(rows: &[Row], row: &Row) -> Option<f64> {
    let one = rows
        .iter()
        .find(|other| other.client == row.client && other.count == 1)?;
    let tokens = row.tokens() - one.tokens();
    (tokens > 0.0).then(|| (row.cpu_s - one.cpu_s) * 1e6 / tokens)
}

/// Every load, as a table.
pub(crate) fn details(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "streams",
        "client",
        "TTFT error, median",
        "p99",
        "ITL error, median",
        "p99",
        "CPU in all",
        "CPU a token",
        "beyond its start",
        "start skew",
        "streams read",
        "server late, p99",
    ]);
    let ms = |value: Option<f64>| value.map_or("–".to_owned(), |ms| format!("{ms:.3} ms"));
    for row in rows {
        let Errors {
            ttft_ms,
            itl_ms,
            skew_ms,
            late_ms,
        } = &row.errors;
        table.add_row([
            row.count.to_string(),
            row.client.name().to_owned(),
            ms(quantile(ttft_ms, 0.5)),
            ms(quantile(ttft_ms, 0.99)),
            ms(quantile(itl_ms, 0.5)),
            ms(quantile(itl_ms, 0.99)),
            format!("{:.2} s", row.cpu_s),
            format!("{:.0} µs", row.cpu_s * 1e6 / row.tokens()),
            match beyond_start_us(rows, row) {
                None => "–".to_owned(),
                Some(us) if us > 0.0 => format!("{us:.0} µs"),
                Some(_) => "not seen".to_owned(),
            },
            format!("{skew_ms:.1} ms"),
            format!("{} of {}", ttft_ms.len(), row.count),
            ms(quantile(late_ms, 0.99)),
        ]);
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// The claims that can be made of `rows`.
pub(crate) fn claims(rows: &[Row]) -> Vec<Claim> {
    let of = |client, count| {
        rows.iter()
            .find(|row| row.client == client && row.count == count)
    };
    let Some(ours) = of(Client::Ours, AT) else {
        return Vec::new();
    };
    let peers = || {
        rows.iter()
            .filter(|row| row.count == AT && row.client != Client::Ours && row.is_whole())
    };
    let mut claims = vec![
        Claim {
            what: "median error of TTFT, 256 streams",
            measured: ours.ttft_ms(0.5),
            limit: 0.2,
            unit: " ms",
            how: format!("{} streams", ours.errors.ttft_ms.len()),
        },
        Claim {
            what: "p99 of it",
            measured: ours.ttft_ms(0.99),
            limit: 2.0,
            unit: " ms",
            how: format!("{} streams", ours.errors.ttft_ms.len()),
        },
    ];
    let best = |of: &dyn Fn(&Row) -> f64| {
        let each = peers().map(|row| (of(row), row.client.name()));
        each.min_by(|a, b| a.0.total_cmp(&b.0))
    };
    let beside = |what, of: &dyn Fn(&Row) -> f64, unit: &str| {
        let (measured, how) = match best(of) {
            Some((peer, name)) => (
                of(ours) / peer,
                format!("{:.2} {unit} ÷ {peer:.1} {unit}, {name}", of(ours)),
            ),
            // Nobody to be better than.
            None => (f64::INFINITY, "no peer read all of its streams".to_owned()),
        };
        Claim {
            what,
            measured,
            limit: 0.1,
            unit: "",
            how,
        }
    };
    if rows.iter().any(|row| row.client != Client::Ours) {
        claims.push(beside(
            "p99 of it ÷ the best peer's",
            &|row| row.ttft_ms(0.99),
            "ms",
        ));
        claims.push(beside(
            "CPU a token ÷ the best peer's, 256 streams",
            &cost_us,
            "µs",
        ));
    }
    if let Some(most) = of(Client::Ours, MOST) {
        let cost = |row: &Row| match row.is_whole() {
            true => beyond_start_us(rows, row).unwrap_or(f64::INFINITY),
            false => f64::INFINITY,
        };
        claims.push(Claim {
            what: "CPU a token beyond its start, 1,000 streams ÷ 256 streams",
            measured: cost(most) / cost(ours),
            limit: 1.5,
            unit: "",
            how: format!("{:.1} µs ÷ {:.1} µs", cost(most), cost(ours)),
        });
    }
    claims
}
