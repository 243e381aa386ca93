//! One picture for each metric: a strip of points for each arm, with its median and interval.
//!
//! SVG without fonts, scripts or time stamps: the same samples are the same bytes. Its ground is
//! painted, so that it can be read on a dark page too. What the points mean is [`super::judge`]'s.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::judge::Report;
use super::median::{Estimate, FEWEST, LEVEL};
use super::sample::{Metric, Sample};

/// Pixels.
const SIZE: (u32, u32) = (900, 480);
/// From the left edge of the picture to the axis, in pixels.
const AXIS: u32 = 70;
/// For title, setting and legend, in pixels.
const HEAD: u32 = 92;
/// For the names of the arms, in pixels.
const FOOT: u32 = 56;

const GROUND: RGBColor = RGBColor(255, 255, 255);
const INK: RGBColor = RGBColor(33, 37, 41);
const FAINT: RGBColor = RGBColor(206, 212, 218);
const BLUE: RGBColor = RGBColor(25, 113, 194);

/// From this ratio of the largest to the smallest on, an axis that begins at zero would press the
/// smallest onto it.
const LOGARITHMIC: f64 = 20.0;

/// The measurements of one arm, in the order in which they were made.
#[derive(Clone, Debug, PartialEq)]
pub struct Strip<'a> {
    /// Its name.
    pub label: &'a str,
    /// Finite, in the unit of the picture.
    pub values: Vec<f64>,
    /// What they come to, if anything.
    pub estimate: Option<Estimate>,
}

/// Why there is no picture.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("no picture can be drawn: {0}")]
pub struct Undrawable(String);

/// The picture of a metric. `setting` says what it was measured on: profile and versions.
///
/// # Errors
/// If a time is not finite.
pub fn of(
    samples: &[Sample],
    report: &Report,
    metric: Metric,
    setting: &str,
) -> Result<String, Undrawable> {
    let rows = report.rows.iter().filter(|row| row.metric == metric);
    let strips: Vec<Strip<'_>> = rows
        .map(|row| Strip {
            label: row.arm.name(),
            values: samples
                .iter()
                .filter(|sample| sample.arm == row.arm && !sample.warm_up)
                .filter_map(|sample| metric.of(sample))
                .collect(),
            estimate: row.ms,
        })
        .collect();
    let counts = strips.iter().map(|strip| strip.values.len());
    let n = match (counts.clone().min(), counts.max()) {
        (Some(least), Some(most)) if least < most => format!("n = {least} to {most}"),
        (_, most) => format!("n = {}", most.unwrap_or(0)),
    };
    let title = format!("{}, {n}", metric.words());
    draw(&title, setting, "ms", &strips)
}

/// The picture of some strips. `title` and `setting`, the line below it, may be any text.
///
/// # Errors
/// If a value is not finite.
pub fn draw(
    title: &str,
    setting: &str,
    unit: &str,
    strips: &[Strip<'_>],
) -> Result<String, Undrawable> {
    let ends = |strip: &Strip<'_>| strip.estimate.map(|one| [one.low, one.high]);
    let values: Vec<f64> = strips
        .iter()
        .flat_map(|strip| {
            ends(strip)
                .into_iter()
                .flatten()
                .chain(strip.values.clone())
        })
        .collect();
    if let Some(value) = values.iter().find(|value| !value.is_finite()) {
        return Err(Undrawable(format!("{value} is on no axis")));
    }
    let least = values.iter().copied().reduce(f64::min).unwrap_or(0.0);
    let most = values.iter().copied().reduce(f64::max).unwrap_or(0.0);
    let texts = Texts {
        title,
        setting,
        unit,
    };
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        let drawn = if least > 0.0 && most / least > LOGARITHMIC {
            // Half of the last step beyond each end, so that no point lies on the frame.
            let axis = (least / 1.5..most * 1.5).log_scale();
            onto(&root, &texts, ", logarithmic", strips, axis)
        } else {
            let top = if most > 0.0 { most * 1.08 } else { 1.0 };
            onto(&root, &texts, "", strips, least.min(0.0)..top)
        };
        drawn
            .and_then(|()| root.present())
            .map_err(|why| Undrawable(why.to_string()))?;
    }
    Ok(text)
}

/// What stands around the strips.
struct Texts<'a> {
    title: &'a str,
    setting: &'a str,
    unit: &'a str,
}

type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

fn onto<'a, Y>(
    root: &Canvas<'a>,
    texts: &Texts<'_>,
    kind_of_axis: &str,
    strips: &[Strip<'_>],
    axis: Y,
) -> Drawn<'a>
where
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    root.fill(&GROUND)?;
    let font = |size: i32, color: &RGBColor| ("sans-serif", size).into_font().color(color);
    let legend = format!(
        "points: in the order of measurement; bar: median; band: its interval ({:.0} % from {FEWEST} rounds on)",
        LEVEL * 100.0
    );
    for (size, below, text) in [
        (20, 14, printable(texts.title)),
        (15, 40, printable(texts.setting)),
        (15, 60, legend),
    ] {
        let left = font(size, &INK).pos(Pos::new(HPos::Left, VPos::Top));
        root.draw_text(&text, &left, (16, below))?;
    }

    let across: Range<f64> = 0.0..strips.len().max(1) as f64;
    let mut chart = ChartBuilder::on(root)
        .margin(16)
        .margin_top(HEAD)
        .x_label_area_size(FOOT)
        .y_label_area_size(AXIS)
        .build_cartesian_2d(across, axis)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(0)
        .y_labels(8)
        .y_desc(format!("{}{kind_of_axis}", printable(texts.unit)))
        .axis_style(INK)
        .bold_line_style(FAINT)
        .light_line_style(TRANSPARENT)
        .label_style(font(15, &INK))
        .y_label_formatter(&|value: &f64| number(*value))
        .draw()?;

    let (xs, ys) = chart.plotting_area().get_pixel_range();
    let (left_edge, width) = (xs.start, f64::from(xs.end - xs.start));
    let foot = ys.end + 8;
    for (at, strip) in strips.iter().enumerate() {
        let middle = at as f64 + 0.5;
        if let Some(Estimate {
            median, low, high, ..
        }) = strip.estimate
        {
            let band = [(middle - 0.3, low), (middle + 0.3, high)];
            let bar = vec![(middle - 0.3, median), (middle + 0.3, median)];
            chart.draw_series([Rectangle::new(band, BLUE.mix(0.18).filled())])?;
            chart.draw_series([PathElement::new(bar, BLUE.stroke_width(2))])?;
        }
        // From left to right as they were measured: a drift is a slope.
        let steps = strip.values.len().saturating_sub(1).max(1) as f64;
        let points = strip.values.iter().enumerate().map(|(nth, value)| {
            let along = match strip.values.len() {
                1 => 0.5,
                _ => nth as f64 / steps,
            };
            let place = (middle - 0.22 + 0.44 * along, *value);
            Circle::new(place, 3, INK.mix(0.75).filled())
        });
        chart.draw_series(points)?;

        let x = left_edge + (width * middle / strips.len() as f64) as i32;
        let centred = |size| font(size, &INK).pos(Pos::new(HPos::Center, VPos::Top));
        root.draw_text(&printable(strip.label), &centred(17), (x, foot))?;
        let median = strip.estimate.map_or_else(String::new, |estimate| {
            format!("{} {}, ", number(estimate.median), texts.unit)
        });
        let below = format!("{median}n = {}", strip.values.len());
        root.draw_text(&printable(&below), &centred(15), (x, foot + 24))?;
    }
    Ok(())
}

/// As few digits as tell neighbours on an axis apart.
fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 1e6 || (size > 0.0 && size < 1e-3) {
        format!("{value:.1e}")
    } else if size >= 100.0 {
        format!("{value:.0}")
    } else {
        let text = format!("{value:.3}");
        let text = text.trim_end_matches('0').trim_end_matches('.');
        text.to_owned()
    }
}

/// What XML cannot hold even escaped becomes a mark.
fn printable(text: &str) -> String {
    let cannot = |c: char| c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}');
    text.replace(cannot, "\u{fffd}")
}

#[cfg(test)]
mod tests;
