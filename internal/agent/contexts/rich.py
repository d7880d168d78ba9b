# The part of the driver that shows values as a notebook does. It is compiled when it is first needed: by a value that is
# more than its text, by display(), or by the import of matplotlib or IPython. What it hands to the driver are dictionaries
# from the names of representations (those of wire.Result) to text; binary ones are in base64, structured ones in JSON.


def rich(emit, report, plain):
    # emit sends a result; report prints an exception of user code; plain has the types that are nothing but their repr.
    import sys

    LIMIT = 8 << 20  # of a result, after base64
    MAX_CELLS = 1 << 18  # of a table that goes along as data
    MAX_POINTS = 1 << 16  # of a chart
    NAMES = {
        "text/plain": "text",
        "text/html": "html",
        "text/markdown": "markdown",
        "text/latex": "latex",
        "image/svg+xml": "svg",
        "image/png": "png",
        "image/jpeg": "jpeg",
        "application/pdf": "pdf",
        "application/json": "json",
        "application/javascript": "javascript",
    }
    METHODS = {
        "_repr_html_": "text/html",
        "_repr_markdown_": "text/markdown",
        "_repr_svg_": "image/svg+xml",
        "_repr_png_": "image/png",
        "_repr_jpeg_": "image/jpeg",
        "_repr_pdf_": "application/pdf",
        "_repr_latex_": "text/latex",
        "_repr_json_": "application/json",
        "_repr_javascript_": "application/javascript",
    }
    BINARY = ("png", "jpeg", "pdf")
    STRUCTURED = ("json", "data", "chart", "extra")
    modules = sys.modules
    left = MAX_POINTS
    boxes = None  # from Axes to the statistics of its box plots

    # --- values -------------------------------------------------------------------------------------------------------

    def is_plain(kind):
        # Whether values of a type have nothing but a repr; looked up as the interpreter does special methods.
        for k in kind.__mro__:
            names = k.__dict__
            if "_repr_mimebundle_" in names or "_ipython_display_" in names:
                return False
            for method in METHODS:
                if method in names:
                    return False
        if kind.__name__ == "Figure" and kind.__module__.startswith("matplotlib"):
            return False
        if not kind.__flags__ & 1 << 9:  # not made by a class statement, so it stays as it is
            plain.add(kind)
        return True

    def of(value, method):
        # A method of a value's class, or None. A class has methods for its values, not for itself.
        if isinstance(value, type):
            return None
        for k in type(value).__mro__:
            if method in k.__dict__:
                return getattr(value, method, None)
        return None

    def bundle(value, include=None, exclude=None):
        # MIME type → data, and forkd's own names.
        data = {}
        figure = is_figure(value)
        mime = of(value, "_repr_mimebundle_")
        if mime is not None:
            try:
                found = mime(include=include, exclude=exclude)
                if isinstance(found, tuple):
                    found = found[0]
                if found:
                    data.update(found)
            except Exception as e:
                report(e)
        for method, kind in METHODS.items():
            if kind in data:
                continue
            call = of(value, method)
            if call is None:
                continue
            try:
                found = call()
            except NotImplementedError:
                continue
            except Exception as e:
                report(e)
                continue
            if isinstance(found, tuple):  # with metadata
                found = found[0]
            if found is not None:
                data[kind] = found
        if figure:
            data.setdefault("image/png", png(value))
            data["chart"] = chart_of(value)
        elif is_table(value):
            data["data"] = table(value)
        data.setdefault("text/plain", repr(value))
        if include or exclude:
            data = {k: v for k, v in data.items() if (not include or k in include) and not (exclude and k in exclude)}
        return data

    def pack(data, main):
        # Makes text of everything, and leaves out what is too large.
        import binascii
        import json

        result, extra, omitted, left = {}, {}, [], LIMIT
        for kind, value in data.items():
            name = NAMES.get(kind, kind if kind in STRUCTURED else "extra")
            if value is None:
                continue
            try:
                if name in BINARY and not isinstance(value, str):
                    if len(value) > LIMIT:  # before it grows
                        omitted.append((name, len(value), LIMIT))
                        continue
                    value = binascii.b2a_base64(value, newline=False).decode()
                elif name in STRUCTURED:
                    if isinstance(value, (bytes, bytearray)):
                        value = binascii.b2a_base64(value, newline=False).decode()
                    value = json.dumps(value, default=plainly)
                    if "NaN" in value or "Infinity" in value:  # which are no JSON
                        value = json.dumps(finite(json.loads(value)))
                elif isinstance(value, (bytes, bytearray)):
                    value = bytes(value).decode("utf-8", "replace")
                else:
                    value = str(value)
            except Exception as e:
                report(e)
                continue
            if len(value) > left:
                if name == "text":
                    value = "%s… [%d more characters cut]" % (value[: 1 << 16], len(value) - (1 << 16))
                else:
                    omitted.append((kind if name == "extra" else name, len(value), LIMIT))
                    continue
            left -= len(value)
            if name == "extra":
                extra[kind] = value
            else:
                result[name] = value.rstrip("\n") if name in BINARY else value
        for name, size, limit in omitted:
            note = "[%s of %.1f MiB left out: a result holds %d MiB]" % (name, size / (1 << 20), limit >> 20)
            result["text"] = (result["text"] + "\n" if result.get("text") else "") + note
        return result, extra, bool(main), tuple(omitted)

    def finite(value):
        if isinstance(value, float):
            return value if value - value == 0 else None
        if isinstance(value, dict):
            return {k: finite(v) for k, v in value.items()}
        if isinstance(value, list):
            return [finite(v) for v in value]
        return value

    def plainly(value):
        # What json does not know: numpy's and pandas's numbers, arrays and times.
        for method in ("isoformat", "item", "tolist"):
            call = getattr(value, method, None)
            if call is not None:
                return call()
        return str(value)

    def represent(value):
        # The text of a trailing expression; what is more than text is sent.
        kind = type(value)
        if isinstance(value, type) or is_plain(kind):
            return repr(value)
        show = of(value, "_ipython_display_")
        if show is not None:
            show()
            return None
        data = bundle(value)
        text = data.get("text/plain")
        if len(data) > 1:
            emit(*pack(data, True))
            if is_figure(value):
                close(value)
        return text if isinstance(text, str) else str(text)

    # --- display ------------------------------------------------------------------------------------------------------

    class Handle:
        def __init__(self, name):
            self.display_id = name

        def display(self, value, **options):
            display(value, **options)

        update = display

    def display(*values, include=None, exclude=None, metadata=None, transient=None, display_id=None, raw=False, clear=False, **more):
        for value in values:
            if raw:
                emit(*pack(dict(value), False))
                continue
            show = of(value, "_ipython_display_")
            if show is not None:
                show()
                continue
            emit(*pack(bundle(value, include, exclude), False))
            if is_figure(value):
                close(value)
        if display_id is not None:
            return Handle("forkd" if display_id is True else display_id)
        return None

    def clear_output(wait=False):
        pass  # what was sent is sent

    # --- IPython.display ----------------------------------------------------------------------------------------------

    class Shown:
        # The classes of IPython.display: something that shows as one MIME type.
        kind, binary = "text/plain", False

        def __init__(self, data=None, url=None, filename=None, metadata=None, **options):
            if data is None and filename is not None:
                with open(filename, "rb" if self.binary else "r") as f:
                    data = f.read()
            self.data, self.url, self.filename, self.metadata, self.options = data, url, filename, metadata, options

        def _repr_mimebundle_(self, include=None, exclude=None):
            return {self.kind: self.data, "text/plain": repr(self)}

        def __repr__(self):
            return "<IPython.core.display.%s object>" % type(self).__name__

    def shown(name, kind, binary=False):
        return type(name, (Shown,), {"kind": kind, "binary": binary, "__module__": "IPython.core.display"})

    class Image(Shown):
        binary = True

        def __init__(self, data=None, url=None, filename=None, format=None, embed=None, width=None, height=None, **options):
            if isinstance(data, str) and url is None and filename is None:
                if data.startswith(("http://", "https://")):
                    data, url = None, data
                elif len(data) < 4096:
                    data, filename = None, data
            super().__init__(data, url, filename, **options)

        def _repr_mimebundle_(self, include=None, exclude=None):
            if self.data is None:
                return {"text/html": '<img src="%s"/>' % self.url, "text/plain": repr(self)}
            head = bytes(self.data[:4])
            kind = "image/jpeg" if head[:3] == b"\xff\xd8\xff" else "application/pdf" if head == b"%PDF" else "image/png"
            return {kind: self.data, "text/plain": repr(self)}

    class Math(Shown):
        def _repr_mimebundle_(self, include=None, exclude=None):
            return {"text/latex": "$\\displaystyle %s$" % self.data.strip("$"), "text/plain": repr(self)}

    class JSON(Shown):
        def _repr_mimebundle_(self, include=None, exclude=None):
            import json

            data = json.loads(self.data) if isinstance(self.data, str) else self.data
            return {"application/json": data, "text/plain": repr(self)}

    for c in (Image, Math, JSON):
        c.__module__ = "IPython.core.display"

    def stand_in():
        # What programs import of IPython where it is not installed.
        display_module = type(sys)("IPython.display")
        display_module.__dict__.update(
            display=display, clear_output=clear_output, Image=Image, Math=Math, JSON=JSON, DisplayObject=Shown,
            HTML=shown("HTML", "text/html"), Markdown=shown("Markdown", "text/markdown"), SVG=shown("SVG", "image/svg+xml"),
            Latex=shown("Latex", "text/latex"), Javascript=shown("Javascript", "application/javascript"),
            Pretty=shown("Pretty", "text/plain"),
        )  # fmt: skip
        package = type(sys)("IPython")
        package.__path__ = []
        package.display = display_module
        package.get_ipython = lambda: None
        package.__version__ = "0"
        return {"IPython": package, "IPython.display": display_module}

    # --- imports ------------------------------------------------------------------------------------------------------

    def imported(module):
        # Runs after one of the modules that the driver looks out for.
        name = module.__name__
        if name == "matplotlib.pyplot":
            module.show = show_figures
        elif name == "matplotlib.axes._axes":
            watch_boxes(module.Axes)
        elif hasattr(module, "display"):  # of IPython, installed but not running here
            module.display = display
            if hasattr(module, "clear_output"):
                module.clear_output = clear_output

    class Loader:
        def __init__(self, loader):
            self.loader = loader

        def __getattr__(self, name):
            return getattr(self.loader, name)

        def create_module(self, spec):
            return self.loader.create_module(spec)

        def exec_module(self, module):
            module.__spec__.loader = module.__loader__ = self.loader
            self.loader.exec_module(module)
            try:
                imported(module)
            except Exception as e:
                report(e)

    class StandIn:
        def __init__(self, module):
            self.module = module

        def create_module(self, spec):
            return self.module

        def exec_module(self, module):
            pass

    def find(finder, name, path, target):
        # The spec of a module to look out for, as everybody else would find it.
        for f in sys.meta_path:
            if f is finder or not hasattr(f, "find_spec"):
                continue
            spec = f.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = Loader(spec.loader)
                return spec
        found = stand_in()
        if name not in found:
            return None
        if name == "IPython":
            for k, v in found.items():
                modules.setdefault(k, v)
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, StandIn(modules.get(name, found[name])), is_package=name == "IPython")

    # --- matplotlib ---------------------------------------------------------------------------------------------------

    def is_figure(value):
        module = modules.get("matplotlib.figure")
        return module is not None and isinstance(value, getattr(module, "Figure", ()))

    def png(figure):
        import io

        if getattr(figure, "canvas", None) is None or not hasattr(figure.canvas, "print_png"):
            from matplotlib.backends.backend_agg import FigureCanvasAgg

            FigureCanvasAgg(figure)
        out = io.BytesIO()
        figure.savefig(out, format="png", bbox_inches="tight")
        return out.getvalue()

    def close(figure):
        plt = modules.get("matplotlib.pyplot")
        if plt is not None:
            plt.close(figure)

    def show_figures(*args, **options):
        # Instead of pyplot.show: every open figure, in the order of making.
        helpers = modules.get("matplotlib._pylab_helpers")
        if helpers is None:
            return
        for manager in list(helpers.Gcf.get_all_fig_managers()):
            figure = manager.canvas.figure
            try:
                data = {"image/png": png(figure), "text/plain": repr(figure), "chart": chart_of(figure)}
            except Exception as e:
                report(e)
                data = None
            close(figure)
            if data is not None:
                emit(*pack(data, False))

    def watch_boxes(axes):
        # A box plot is lines and patches afterwards; its statistics are best taken where it is made.
        nonlocal boxes
        import functools
        import weakref

        boxes = weakref.WeakKeyDictionary()
        original = axes.bxp

        @functools.wraps(original)
        def bxp(self, bxpstats, *args, **options):
            made = original(self, bxpstats, *args, **options)
            try:
                vertical = options.get("vert") is not False and options.get("orientation") != "horizontal"
                boxes.setdefault(self, []).append((list(bxpstats), vertical))
            except Exception:
                pass
            return made

        axes.bxp = bxp

    def chart_of(figure):
        nonlocal left
        left = MAX_POINTS
        try:
            axes = [a for a in figure.get_axes() if a.get_label() != "<colorbar>"]
            if not axes:
                return None
            if len(axes) == 1:
                return chart(axes[0])
            title = figure.get_suptitle() if hasattr(figure, "get_suptitle") else figure._suptitle and figure._suptitle.get_text()
            return {"type": "superchart", "title": title or None, "elements": [chart(a) for a in axes]}
        except Exception:
            return None  # the picture is what matters

    def chart(axes):
        from matplotlib.collections import PathCollection
        from matplotlib.lines import Line2D
        from matplotlib.patches import Rectangle, Wedge

        made = {"type": "unknown", "title": axes.get_title() or None, "elements": []}
        if boxes is not None and axes in boxes:
            return box_chart(axes, made)
        lines = [line for line in axes.get_lines() if len(line.get_xdata()) > 0]
        artists = [a for a in axes.get_children() if isinstance(a, Wedge)]
        if artists:
            made["type"] = "pie"
            made["elements"] = [{"label": w.get_label(), "angle": number(abs(w.theta2 - w.theta1)), "radius": number(w.r)} for w in artists]
            return made
        bars = [c for c in axes.containers if len(c) and all(isinstance(r, Rectangle) for r in c)]
        if bars:
            return bar_chart(axes, made, bars)
        scatters = [c for c in axes.collections if isinstance(c, PathCollection)]
        if scatters and not lines:
            elements = [
                {"label": name(c.get_label(), "_child", "Scatter"), "points": points(axes, *zip(*c.get_offsets().tolist()))}
                for c in scatters if len(c.get_offsets())
            ]  # fmt: skip
            return point_chart(axes, made, "scatter", elements)
        if lines and all(isinstance(line, Line2D) for line in lines):
            elements = [
                {"label": name(line.get_label(), "_child", "Line"), "points": points(axes, line.get_xdata(), line.get_ydata())}
                for line in lines
            ]
            return point_chart(axes, made, "line", elements)
        return made

    def name(label, prefix, kind):
        label = str(label)
        return "%s %s" % (kind, label[len(prefix) :]) if label.startswith(prefix) else label

    def number(value):
        value = float("%.10g" % value)
        return value if value - value == 0 else None

    def point(value, axis):
        if isinstance(value, str):
            return value
        if hasattr(value, "isoformat"):
            return value.isoformat()
        if type(value).__name__ == "datetime64":
            return str(value.astype("datetime64[s]"))
        if is_dates(axis):
            return date(value)
        return number(value)

    def points(axes, xs, ys):
        nonlocal left
        most = max(0, min(len(xs), left))
        left -= most
        xs, ys = xs[:most], ys[:most]
        return [[point(x, axes.xaxis), point(y, axes.yaxis)] for x, y in zip(xs, ys)]

    def converter(axis):
        get = getattr(axis, "get_converter", None)
        return get() if get is not None else getattr(axis, "converter", None)

    def is_dates(axis):
        return "Date" in type(converter(axis)).__name__

    def date(value):
        return modules["matplotlib.dates"].num2date(value).isoformat()

    def planar(axes, made):
        import re

        for which, label in (("x", axes.get_xlabel()), ("y", axes.get_ylabel())):
            unit = re.search(r"\s\((.*?)\)|\[(.*?)\]", label)
            made[which + "_label"] = label or None
            made[which + "_unit"] = unit and (unit.group(1) or unit.group(2)) or None

    def turn(made):
        made["x_label"], made["y_label"] = made["y_label"], made["x_label"]
        made["x_unit"], made["y_unit"] = made["y_unit"], made["x_unit"]

    def point_chart(axes, made, kind, elements):
        made["type"], made["elements"] = kind, elements
        planar(axes, made)
        for which, axis, scale in (("x", axes.xaxis, axes.get_xscale()), ("y", axes.yaxis, axes.get_yscale())):
            ticks = [t if isinstance(t, str) else float(t) for t in axis.get_ticklocs()]
            labels = [t.get_text() for t in axis.get_ticklabels()]
            if is_dates(axis):
                ticks, scale = [date(t) for t in ticks], "datetime"
            elif "Category" in type(converter(axis)).__name__:
                scale = "categorical"
            elif scale == "linear" and ticks and all(t == i and str(i) != s for i, (t, s) in enumerate(zip(ticks, labels))):
                scale = "categorical"
            made[which + "_ticks"], made[which + "_tick_labels"], made[which + "_scale"] = ticks, labels, scale
        return made

    def bar_chart(axes, made, containers):
        made["type"] = "bar"
        planar(axes, made)
        turned = False
        for container in containers:
            group = name(container.get_label(), "_container", "Group")
            rectangles = list(container)
            horizontal = getattr(container, "orientation", None) == "horizontal"
            axis = axes.yaxis if horizontal else axes.xaxis
            labels = dict(zip((number(t) for t in axis.get_ticklocs()), (t.get_text() for t in axis.get_ticklabels())))
            order = list(labels.values())
            turned = turned or horizontal
            for i, r in enumerate(rectangles):
                middle = r.get_y() + r.get_height() / 2 if horizontal else r.get_x() + r.get_width() / 2
                label = labels.get(number(middle))
                if label is None:
                    label = order[i] if len(order) == len(rectangles) else "%.6g" % middle
                value = r.get_width() if horizontal else r.get_height()
                made["elements"].append({"label": label, "group": group, "value": number(value)})
        if turned:
            turn(made)
        return made

    def box_chart(axes, made):
        made["type"] = "box_and_whisker"
        planar(axes, made)
        for stats, vertical in boxes[axes]:
            if not vertical:
                turn(made)
            labels = [t.get_text() for t in (axes.get_xticklabels() if vertical else axes.get_yticklabels())]
            for i, s in enumerate(stats):
                label = s.get("label")
                if not label:
                    label = labels[i] if i < len(labels) else str(i + 1)
                made["elements"].append({
                    "label": str(label), "min": number(s["whislo"]), "first_quartile": number(s["q1"]), "median": number(s["med"]),
                    "third_quartile": number(s["q3"]), "max": number(s["whishi"]), "outliers": [number(v) for v in s.get("fliers", ())],
                })  # fmt: skip
        return made

    # --- pandas -------------------------------------------------------------------------------------------------------

    def is_table(value):
        module = modules.get("pandas")
        return module is not None and isinstance(value, getattr(module, "DataFrame", ()))

    def table(frame):
        if frame.size > MAX_CELLS:
            return None
        try:
            return {str(k): [v.isoformat() if hasattr(v, "isoformat") else v for v in c] for k, c in frame.to_dict(orient="list").items()}
        except Exception:
            return None

    class Rich:
        pass

    r = Rich()
    r.represent, r.display, r.find, r.finish, r.clear_output = represent, display, find, show_figures, clear_output
    return r
