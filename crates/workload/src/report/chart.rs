//! Line charts as SVG.

use std::fmt::Write;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 40.0;

/// The legend of a chart that is a file: series per row, and the height and baseline of a row.
const LEGEND_COLUMNS: usize = 4;
const LEGEND_ROW: f64 = 18.0;
const LEGEND_TEXT: f64 = 13.0;

/// The approximate number of gridlines of an axis.
const TICKS: f64 = 6.0;

/// Points are drawn as dots if no series of a chart has more than this many.
const MAX_DOTTED_POINTS: usize = 40;

/// The minimum width of a marked range.
const MIN_SPAN: f64 = 2.0;

/// The colours of series. The style of the page defines them for light and for dark pages.
const COLOURS: [&str; 8] =
    ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)", "var(--c7)"];

/// A named series of points.
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    /// Ranges of x that are marked in the colour of the series.
    pub(crate) spans: Vec<(f64, f64)>,
    pub(crate) dashed: bool,
}

impl Series {
    pub(crate) fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Series {
        Series { name: name.into(), points, spans: Vec::new(), dashed: false }
    }

    /// A dashed series, for values that this run did not measure.
    pub(crate) fn dashed(name: impl Into<String>, points: Vec<(f64, f64)>) -> Series {
        Series { dashed: true, ..Series::new(name, points) }
    }
}

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scale {
    /// Linear, including zero.
    Linear,
    /// Logarithmic, by powers of ten.
    Log,
    /// For shares from 0 to 1: logarithmic in the distance to 1 (50 %, 90 %, 99 % ...).
    Nines,
}

/// A line chart.
pub(crate) struct Chart {
    pub(crate) title: &'static str,
    pub(crate) x: (&'static str, Scale),
    pub(crate) y: (&'static str, Scale),
    pub(crate) series: Vec<Series>,
    /// The area before this x is shaded: the warm-up.
    pub(crate) measured_from: Option<f64>,
}

/// An axis, which maps values to positions from 0 to 1.
struct Axis {
    scale: Scale,
    from: f64,
    to: f64,
}

impl Axis {
    fn of(scale: Scale, values: impl Iterator<Item = f64>) -> Axis {
        let range = |(low, high): (f64, f64), value: f64| (low.min(value), high.max(value));
        let placed = values.map(|value| project(scale, value)).filter(|value| value.is_finite());
        let (low, high) = placed.fold((f64::INFINITY, f64::NEG_INFINITY), range);
        let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
        let (from, to) = match scale {
            Scale::Linear => (low.min(0.0), if high > 0.0 { high } else { 1.0 }),
            Scale::Log => (low.floor(), (low.floor() + 1.0).max(high.ceil())),
            Scale::Nines => (0.0, high.max(1.0)),
        };
        Axis { scale, from, to }
    }

    /// Extends a linear axis to the next tick, so that no line runs along the frame.
    fn extend_to_tick(self) -> Axis {
        match self.scale {
            Scale::Linear => Axis { to: (self.to / self.step()).ceil() * self.step(), ..self },
            Scale::Log | Scale::Nines => self,
        }
    }

    /// The distance between two ticks of a linear axis.
    fn step(&self) -> f64 {
        round_up_step((self.to - self.from) / TICKS)
    }

    /// The position of a value, or `None` if the scale cannot show it (the logarithm of zero).
    fn place(&self, value: f64) -> Option<f64> {
        let placed = (project(self.scale, value) - self.from) / (self.to - self.from);
        placed.is_finite().then_some(placed.clamp(0.0, 1.0))
    }

    /// The values with a gridline, and their labels.
    fn ticks(&self) -> Vec<(f64, String)> {
        let whole = |from: f64, to: f64| (from as i32)..=(to as i32);
        match self.scale {
            Scale::Linear => {
                let step = self.step();
                let first = (self.from / step).ceil();
                let count = ((self.to / step * 1.000_001).floor() - first) as u32;
                let values = (0..=count).map(|number| (first + f64::from(number)) * step);
                values.map(|value| (value, abbreviate(value))).collect()
            }
            Scale::Log => whole(self.from, self.to)
                .map(|power| 10_f64.powi(power))
                .map(|value| (value, abbreviate(value)))
                .collect(),
            Scale::Nines => {
                let percent = |nines: i32| format!("{} %", 100.0 - 10_f64.powi(2 - nines));
                whole(0.0, self.to).map(|nines| (1.0 - 10_f64.powi(-nines), percent(nines))).collect()
            }
        }
    }
}

fn project(scale: Scale, value: f64) -> f64 {
    match scale {
        Scale::Linear => value,
        Scale::Log => value.log10(),
        Scale::Nines => -(1.0 - value).log10(),
    }
}

/// Rounds a step up to 1, 2 or 5 times a power of ten.
fn round_up_step(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    let digits = [1.0, 2.0, 5.0, 10.0].into_iter().find(|digit| digit * power >= step * 0.999);
    digits.unwrap_or(10.0) * power
}

/// Formats a number with as many digits as it needs, and a unit prefix if it is large.
fn abbreviate(value: f64) -> String {
    let rounded = (value * 1e6).round() / 1e6;
    match rounded.abs() {
        size if size >= 1e9 => format!("{}G", rounded / 1e9),
        size if size >= 1e6 => format!("{}M", rounded / 1e6),
        size if size >= 1e4 => format!("{}k", rounded / 1e3),
        _ => format!("{}", if rounded == 0.0 { 0.0 } else { rounded }),
    }
}

/// Escapes text for HTML.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl Chart {
    pub(crate) fn svg(&self) -> String {
        format!(
            "<figure><figcaption>{}</figcaption>{}<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             role=\"img\" aria-label=\"{}\">\n{}</svg></figure>\n",
            escape(self.title),
            self.legend(),
            escape(self.title),
            self.drawing(),
        )
    }

    /// The chart as a file of its own, with its title and legend.
    pub(super) fn file(&self, style: &str) -> String {
        let legend_rows = self.series.len().div_ceil(LEGEND_COLUMNS);
        let top = LEGEND_ROW * (legend_rows + 1) as f64;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {}\" role=\"img\" \
             aria-label=\"{}\">\n<style>{style}</style>\n\
             <rect width=\"100%\" height=\"100%\" style=\"fill:var(--page)\"/>\n\
             <text x=\"{LEFT}\" y=\"{LEGEND_TEXT}\" style=\"font-weight:600\">{}</text>\n",
            HEIGHT + top,
            escape(self.title),
            escape(self.title),
        );
        for (index, (series, colour)) in self.series.iter().zip(COLOURS.iter().cycle()).enumerate() {
            let column = (WIDTH - LEFT - RIGHT) / LEGEND_COLUMNS as f64;
            let x = LEFT + column * (index % LEGEND_COLUMNS) as f64;
            let y = LEGEND_ROW * (index / LEGEND_COLUMNS + 1) as f64;
            // Writing to a string cannot fail. The same applies below.
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{}\" width=\"9\" height=\"9\" style=\"fill:{colour}\"/>\
                 <text x=\"{:.1}\" y=\"{}\">{}</text>",
                y + LEGEND_TEXT - 9.0,
                x + 14.0,
                y + LEGEND_TEXT,
                escape(&series.name),
            );
        }
        let _ = writeln!(svg, "<g transform=\"translate(0 {top})\">\n{}</g>\n</svg>", self.drawing());
        svg
    }

    /// The axes, gridlines and series.
    fn drawing(&self) -> String {
        let values = |pick: fn(&(f64, f64)) -> f64| {
            self.series.iter().flat_map(|series| series.points.iter()).map(pick)
        };
        let x = Axis::of(self.x.1, values(|point| point.0));
        let y = Axis::of(self.y.1, values(|point| point.1)).extend_to_tick();
        let mut svg = String::new();
        self.shade(&mut svg, &x);
        self.grid(&mut svg, &x, &y);
        let dotted = self.series.iter().all(|series| series.points.len() <= MAX_DOTTED_POINTS);
        for (series, colour) in self.series.iter().zip(COLOURS.iter().cycle()) {
            let path = path(&series.points, &x, &y);
            for (from, to) in &series.spans {
                let Some((from, to)) = x.place(*from).zip(x.place(*to)) else { continue };
                let (left, height) = (x_pixel(from), HEIGHT - TOP - BOTTOM);
                let width = (x_pixel(to) - left).max(MIN_SPAN);
                let _ = writeln!(
                    svg,
                    "<rect x=\"{left:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{height}\" \
                     class=\"span\" style=\"fill:{colour};opacity:.25\"/>"
                );
            }
            let dashes = if series.dashed { " stroke-dasharray=\"6 4\"" } else { "" };
            let _ = writeln!(
                svg,
                "<path d=\"{path}\" fill=\"none\" style=\"stroke:{colour}\" stroke-width=\"1.5\"{dashes}/>"
            );
            if dotted {
                dots(&mut svg, &series.points, colour, &x, &y);
            }
        }
        svg
    }

    fn legend(&self) -> String {
        let series = self.series.iter().zip(COLOURS.iter().cycle());
        let names = series.map(|(series, colour)| {
            format!("<span><i style=\"background:{colour}\"></i>{}</span>", escape(&series.name))
        });
        format!("<div class=\"legend\">{}</div>", names.collect::<String>())
    }

    fn shade(&self, svg: &mut String, x: &Axis) {
        let Some(place) = self.measured_from.and_then(|from| x.place(from)).filter(|place| *place > 0.0)
        else {
            return;
        };
        let (width, height) = (x_pixel(place) - LEFT, HEIGHT - TOP - BOTTOM);
        let _ = writeln!(
            svg,
            "<rect x=\"{LEFT}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{height}\" class=\"warm-up\"/>"
        );
    }

    fn grid(&self, svg: &mut String, x: &Axis, y: &Axis) {
        for (value, text) in y.ticks() {
            let Some(at) = y.place(value).map(y_pixel) else { continue };
            let (right, middle) = (WIDTH - RIGHT, at + 4.0);
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\" class=\"grid\"/>"
            );
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{middle:.1}\" text-anchor=\"end\">{text}</text>",
                LEFT - 6.0
            );
        }
        for (value, text) in x.ticks() {
            let Some(at) = x.place(value).map(x_pixel) else { continue };
            let (bottom, below) = (HEIGHT - BOTTOM, HEIGHT - BOTTOM + 16.0);
            let _ = writeln!(
                svg,
                "<line x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\" class=\"grid\"/>"
            );
            let _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{below}\" text-anchor=\"middle\">{text}</text>");
        }
        let (middle, last) = ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 6.0);
        let _ = writeln!(
            svg,
            "<text x=\"{middle}\" y=\"{last}\" text-anchor=\"middle\">{}</text>",
            escape(self.x.0)
        );
        let height = (HEIGHT - BOTTOM + TOP) / 2.0;
        let _ = writeln!(
            svg,
            "<text x=\"12\" y=\"{height}\" text-anchor=\"middle\" transform=\"rotate(-90 12 {height})\">{}</text>",
            escape(self.y.0)
        );
    }
}

fn x_pixel(place: f64) -> f64 {
    LEFT + place * (WIDTH - LEFT - RIGHT)
}

fn y_pixel(place: f64) -> f64 {
    HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)
}

/// The path through the points. A point that cannot be shown interrupts the line.
fn path(points: &[(f64, f64)], x: &Axis, y: &Axis) -> String {
    let mut path = String::new();
    let mut command = 'M';
    for (point_x, point_y) in points {
        match x.place(*point_x).zip(y.place(*point_y)) {
            Some((right, up)) => {
                let _ = write!(path, "{command}{:.1} {:.1}", x_pixel(right), y_pixel(up));
                command = 'L';
            }
            None => command = 'M',
        }
    }
    path
}

fn dots(svg: &mut String, points: &[(f64, f64)], colour: &str, x: &Axis, y: &Axis) {
    for (right, up) in points.iter().filter_map(|point| x.place(point.0).zip(y.place(point.1))) {
        let (right, up) = (x_pixel(right), y_pixel(up));
        let _ = writeln!(svg, "<circle cx=\"{right:.1}\" cy=\"{up:.1}\" r=\"2.5\" style=\"fill:{colour}\"/>");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(axis: &Axis) -> Vec<String> {
        axis.ticks().into_iter().map(|(_, text)| text).collect()
    }

    #[test]
    fn ticks_are_round_numbers() {
        let axis = |scale, values: &[f64]| Axis::of(scale, values.iter().copied());
        assert_eq!(texts(&axis(Scale::Linear, &[3.0, 97.0])), ["0", "20", "40", "60", "80"]);
        assert_eq!(texts(&axis(Scale::Linear, &[-2.0, 10.0])), ["-2", "0", "2", "4", "6", "8", "10"]);
        let padded = axis(Scale::Linear, &[0.0, 97.0]).extend_to_tick();
        assert_eq!((texts(&padded).last().unwrap().as_str(), padded.place(100.0)), ("100", Some(1.0)));
        let padded = axis(Scale::Linear, &[0.0, 0.57]).extend_to_tick();
        assert_eq!(texts(&padded), ["0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6"]);
        assert_eq!(texts(&axis(Scale::Linear, &[0.0])), ["0", "0.2", "0.4", "0.6", "0.8", "1"]);
        assert_eq!(texts(&axis(Scale::Linear, &[45_000.0])), ["0", "10k", "20k", "30k", "40k"]);
        assert_eq!(texts(&axis(Scale::Log, &[0.3, 42.0, 0.0])), ["0.1", "1", "10", "100"]);
        assert_eq!(texts(&axis(Scale::Nines, &[0.0, 0.9995])), ["0 %", "90 %", "99 %", "99.9 %"]);
        assert_eq!(texts(&axis(Scale::Log, &[])).len(), 2, "an axis without values has ticks");
    }

    #[test]
    fn unshowable_points_interrupt_the_line() {
        let points = [(0.0, 1.0), (1.0, 10.0), (2.0, 0.0), (3.0, 100.0)];
        let x = Axis::of(Scale::Linear, points.iter().map(|point| point.0));
        let y = Axis::of(Scale::Log, points.iter().map(|point| point.1));
        let path = path(&points, &x, &y);
        assert_eq!((path.matches('M').count(), path.matches('L').count()), (2, 1), "{path}");
    }

    #[test]
    fn names_are_escaped() {
        let series = vec![Series::new("<script>&\"", vec![(0.0, 1.0)])];
        let x = ("s", Scale::Linear);
        let svg = Chart { title: "t", x, y: x, series, measured_from: None }.svg();
        assert!(svg.contains("&lt;script&gt;&amp;&quot;") && !svg.contains("<script>"));
    }
}
