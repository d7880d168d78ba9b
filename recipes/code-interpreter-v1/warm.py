import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import scipy


# What a first answer needs of the libraries is loaded and read from disk now, not by every child.
def _warm():
    import io

    import scipy.integrate
    import scipy.interpolate
    import scipy.linalg
    import scipy.optimize
    import scipy.signal
    import scipy.sparse
    import scipy.stats

    x = np.linspace(0, 1, 50)
    np.linalg.inv(np.eye(3)), np.fft.fft(x), np.sort(x), repr(x)
    scipy.optimize.minimize(lambda v: (v**2).sum(), np.ones(2))
    scipy.stats.linregress(x, 2 * x)
    frame = pd.read_csv(io.StringIO("day,city,n\n2024-01-01,a,1\n2024-01-02,b,2\n2024-01-03,a,3\n"), parse_dates=["day"])
    frame.groupby("city").n.mean(), frame.describe(), frame.merge(frame, on="city"), repr(frame), frame._repr_html_()
    frame.set_index("day").resample("W").n.sum()
    # The font cache is built by the first figure.
    figure, axes = plt.subplots(2, 2)
    axes[0, 0].plot(x, x**2, label="a")
    axes[0, 0].set_title("title")
    axes[0, 0].legend()
    axes[0, 1].scatter(x, x)
    axes[1, 0].bar(["a", "b"], [1, 2])
    axes[1, 1].hist(x)
    figure.tight_layout()
    figure.savefig(io.BytesIO(), format="png")
    plt.close(figure)


def _packages():
    # Where pip puts a user's packages: an interpreter looks there only if it is there when it starts.
    import os
    import site

    where = site.getusersitepackages()
    os.makedirs(where, exist_ok=True)
    site.addsitedir(where)


_warm()
_packages()
del _warm, _packages
plt.plot([1, 2])  # and is shown, as a child's figures are
plt.show()
plt.close("all")
del matplotlib, np, pd, plt, scipy  # as on E2B, code imports what it uses: that is quick now
