"""Texts that tokenizers disagree about, and strategies for more of them."""

from hypothesis import strategies as st

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "a\n\n\nb\r\n\tc \t d\u00a0e\u3000f",
    "   \n   \n",
    "It's, they're, I'LL, we'Ve, don't; 'sup ''quoted''",
    "1234567890 3.14159 1,000,000 v2.0.1 0x1F ½ ² ٣٤٥ Ⅷ 一二三",
    "def f(x):\n    return {k: v**2 for k, v in x.items() if k != 'α'}  # done\n",
    "#include <vector>\nint main(){std::vector<int> v{1,2};return v[0]<<3;}",
    "https://example.org/a_b?c=d&e=%20f#g user@example.org $HOME/.cache",
    "Les élèves naïfs où ça coûte 5€ — œuvre… «guillemets»",
    "Straße Ärger Übung ẞ ﬁn Å Å",
    "Москва слезам не верит. Київ, Ўзбекистон",
    "日本語のテキスト、漢字とカタカナ。中文测试，標點符號！한국어 텍스트",
    "العربية ١٢٣ עברית हिन्दी ไทยภาษา",
    "👩‍👩‍👧‍👦 👍🏽 🇺🇳 🏴󠁧󠁢󠁳󠁣󠁴󠁿 e\u0301 \u200b\u200d\ufeff",
    "\x00\x01\x7f\u0085\u2028\u2029 control",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa !!!!!!!!!!!!!!! ---------- ______",
    "CamelCaseWords snake_case SCREAMING kebab-case x²+y²=z²",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start|",
]

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]

any_text = st.lists(
    st.one_of(st.text(max_size=12), st.sampled_from(TEXTS), st.text(" \n\t'sadé1٣🙂.!", max_size=12)), max_size=3
).map("".join)
