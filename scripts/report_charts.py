"""Charts of report.py: figures of HTML with inline SVG. Their colours are the page's."""
import html
import math

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 370, 230, 44, 12, 10, 34     # of a chart
escape = html.escape


def short(value):
    """A number for an axis: 1500 is 1.5k."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def ticks(low, high):
    """About five round numbers from low to high."""
    rough = (high - low) / 5 or 1
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * t for t in (1, 2, 5, 10, 20) if power * t >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def finite(values):
    return [v for v in values if v is not None and math.isfinite(v)]


def thin(points, most=400):
    """At most 2 * most points: the lowest and the highest of each stretch, so that peaks stay."""
    size = -(-len(points) // most)
    if size <= 2:
        return points
    out = []
    for i in range(0, len(points), size):
        part = [p for p in points[i:i + size] if finite([p[1]])]
        if part:
            ends = (min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1]))
            out += sorted(set(ends))
        else:
            out.append(points[i])
    return out


def chart(title, caption, x_label, lines, low=None, high=None, marks=()):
    """A figure with lines (class, name, xs, ys). Values above high are cut; marks (x, sign) are
    written at the top. The points of class "two dots" are marked."""
    xs = finite(x for line in lines for x in line[2])
    ys = finite(y for line in lines for y in line[3])
    x0, x1 = (0 if min(xs) < max(xs) / 2 else min(xs)), max(xs)
    low = min(ys, default=0) if low is None else low
    high = max(ys, default=1) if high is None else high
    pad = 0.04 * (high - low) or 0.5
    low, high = (low - pad if low else 0), high + pad

    def px(x):
        return LEFT + (x - x0) / ((x1 - x0) or 1) * (WIDTH - LEFT - RIGHT)

    def py(y):
        return HEIGHT - BOTTOM - (min(y, high) - low) / (high - low) * (HEIGHT - BOTTOM - TOP)
    svg = y_axis(ticks(low, high), py)
    svg += [text(px(x), HEIGHT - BOTTOM + 16, short(x)) for x in ticks(x0, x1)]
    svg += [text(WIDTH - RIGHT, HEIGHT - 3, x_label, "end")]
    for kind, _, line_x, line_y in lines:
        path, pen = [], "M"
        for x, y in thin(list(zip(line_x, line_y))):
            if not finite([y]):
                pen = "M"       # a gap
                continue
            path.append(f"{pen}{px(x):.1f} {py(y):.1f}")
            pen = "L"
            if "dots" in kind:
                svg.append(f'<circle fill="var(--two)" cx="{px(x):.1f}" cy="{py(y):.1f}" r="3"/>')
        svg.append(f'<path class="line {kind}" d="{"".join(path)}"/>')
    svg += [text(px(x), TOP + 6, sign) for x, sign in marks]
    return figure(title, caption, [(kind.split()[0], name) for kind, name, _, _ in lines], svg)


def text(x, y, what, anchor="middle"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(what)}</text>'


def y_axis(values, py):
    return [f'<path class="axis" d="M{LEFT} {py(y):.1f}H{WIDTH - RIGHT}"/>'
            + text(LEFT - 6, py(y) + 4, short(y), "end") for y in values]


def figure(title, caption, names, svg):
    keys = "".join(f'<span class="key"><i style="background: var(--{c})"></i>{escape(name)}</span> '
                   for c, name in names)
    return (f'<figure><h3>{escape(title)}</h3><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(title)}">{"".join(svg)}</svg>'
            f"<figcaption>{keys}<br>{escape(caption)}</figcaption></figure>\n")


def histogram(title, caption, x_label, labels, series):
    """Bars in percent, in two colours: series (name, values), a value for each label. Labels belong
    to the left end of their bars."""
    high = 1.08 * max(max(values) for _, values in series)
    width = (WIDTH - LEFT - RIGHT) / len(labels)

    def py(y):
        return HEIGHT - BOTTOM - y / high * (HEIGHT - BOTTOM - TOP)
    svg = y_axis(ticks(0, high), py) + [text(WIDTH - RIGHT, HEIGHT - 3, x_label, "end")]
    for j, (colour, (_, values)) in enumerate(zip(("one", "two"), series)):
        for i, y in enumerate(values):
            svg.append(f'<rect fill="var(--{colour})" x="{LEFT + (i + 0.1 + 0.4 * j) * width:.1f}" '
                       f'y="{py(y):.1f}" width="{0.4 * width:.1f}" height="{py(0) - py(y):.1f}"/>')
    svg += [text(LEFT + i * width, HEIGHT - BOTTOM + 16, label) for i, label in enumerate(labels)
            if i % (1 + len(labels) // 10) == 0]
    return figure(title, caption, zip(("one", "two"), (name for name, _ in series)), svg)


def no_chart(title, why):
    return f'<figure><h3>{escape(title)}</h3><p class="muted">{escape(why)}</p></figure>\n'
