"""A picture in regions to click on, the shares of its prompt, and the words of an answer that a region raised."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence

import streamlit as st
from markupsafe import Markup

from icebear.app.web.shared import clickable, markdown
from icebear.app.web.shared.bars import Bar, bars
from icebear.concepts.answers.image_words import WordMap, raised_words, regions
from icebear.concepts.nodes.image_shares import ImageShares
from icebear.models.text.images import ImageMap

SHOWN_WORDS = 6
"""The words of a region that are shown."""
PICTURE = Markup("""<style>
.regions{{position:relative;line-height:0}}.regions img{{width:100%}}
.regions span{{position:absolute;box-sizing:border-box;cursor:pointer;border:1px solid #8884}}
.regions span:hover,.regions span:focus-visible{{outline:2px solid #111;box-shadow:inset 0 0 0 2px #fff}}
.regions [aria-pressed=true]{{border:3px solid #111;box-shadow:inset 0 0 0 2px #fff}}
</style><div class="regions"><img alt="The image, red where it supports the word, blue where it opposes it"
src="data:image/png;base64,{png}">{parts}</div>""")
PART = Markup(
    '<span role="button" tabindex="0" data-pick="{name}" aria-pressed="{pressed}" aria-label="{label}" title="{label}" '
    'style="left:{left:.3f}%;top:{top:.3f}%;width:{width:.3f}%;height:{height:.3f}%"></span>'
)


def draw(image: ImageMap, chosen: str | None, on_clicked: Callable[[str], object]) -> None:
    """Draw the relevance map with its regions; a click calls `on_clicked` with the region's name."""
    patches = image.patches
    high, wide = (100 / count for count in patches.shape)
    parts = Markup().join(
        PART.format(
            name=region.name,
            pressed=str(region.name == chosen).lower(),
            label=f"{region.label}: {region.total(patches):+.3f}",
            left=wide * region.left,
            top=high * region.top,
            width=wide * (region.right - region.left),
            height=high * (region.bottom - region.top),
        )
        for region in regions(patches)
    )
    clickable.draw(PICTURE.format(png=b64encode(image.png()).decode(), parts=parts), "regions", on_clicked)


def draw_shares(shares: ImageShares) -> None:
    """Show the shares of image, text and template, each above the same with the image blurred."""
    rows = []
    for part, share in shares.shares.items():
        blurred = shares.blurred_shares[part]
        rows.append(Bar(part.capitalize(), share, f"{share:.0%} ({shares.sums[part]:+.2f})"))
        rows.append(Bar("image blurred", blurred, f"{blurred:.0%} ({shares.blurred_sums[part]:+.2f})", True))
    st.html(bars(rows))
    st.caption(
        "Shares of the sizes of all relevance; in parentheses the sums, in logits. Gray: with the image blurred."
    )


def draw_words(maps: Sequence[WordMap], name: str) -> None:
    """Show the words that a region raised most, each above its control."""
    region = next((area for area in regions(maps[0].patches) if area.name == name), None)
    if region is None:
        return
    st.markdown(f"## The words that {markdown.plain(region.label)} raised")
    raised = raised_words(maps, region)[:SHOWN_WORDS]
    if not raised:
        st.info("No word of the answer has positive relevance at this region.")
        return
    rows = []
    for word, total, control in raised:
        rows += [Bar(word, total, f"{total:+.3f}"), Bar("mean of other regions", control, f"{control:+.3f}", True)]
    st.html(bars(rows))
    st.caption("Relevance of this region for each word of the answer, in logits. Gray: the control.")
