# Writes the man page org.csid1(5) from the comments of proto/dbus/org.csid1.xml.
# Indentation says what a line is: less the comment's own, 0 is text or an @argument, 2 an item, more goes on with the item.

function roff(text) {
    gsub(/\\/, "\\e", text)
    gsub(/-/, "\\-", text)
    sub(/^[.']/, "\\\\\\&&", text)
    return text
}

function depth(line) {
    match(line, /^ */)
    return RLENGTH
}

# "NAME (TYPE): text" and "NAME: text" have the tag in front of the colon, "NAME   text" in front of the spaces.
function item(text,    at, wide) {
    at = match(text, /: /) ? RSTART : length(text) + 1
    wide = 2
    if (match(text, /  +/) && RSTART < at) {
        at = RSTART
        wide = RLENGTH
    }
    print ".TP\n\\fB" roff(substr(text, 1, at - 1)) "\\fP"
    if (at < length(text)) print roff(substr(text, at + wide))
}

function nest(wanted) {
    while (nested < wanted) { print ".RS"; nested++ }
    while (nested > wanted) { print ".RE"; nested-- }
}

# A member's or an interface's comment, without its first line.
function body(from,    i, base, text) {
    base = depth(comment[1])
    for (i = from; i <= lines; i++) {
        text = comment[i]
        sub(/^ */, "", text)
        if (text == "") {
            nest(0)
            print ".PP"
        } else if (depth(comment[i]) == base + 2) {
            nest(1)
            item(text)
        } else if (depth(comment[i]) > base) {
            print roff(text)
        } else if (text ~ /^@/) {
            nest(0)
            item(substr(text, 2))
        } else if (text ~ /^(Access|Errors|Since):/) {
            nest(0)
            print ".PP\n" roff(text)
        } else {
            print roff(text)
        }
    }
    nest(0)
}

# The comment in front of everything: a title has its text and its items below it.
function preamble(    i, text) {
    print ".SH DESCRIPTION"
    for (i = 1; i <= lines; i++) {
        text = comment[i]
        sub(/^ */, "", text)
        if (text == "") continue
        if (depth(comment[i]) == 2 && comment[i - 1] == "" && i > 1) print ".SH " roff(toupper(text))
        else if (depth(comment[i]) == 6) item(text)
        else if (depth(comment[i]) == 4 && depth(comment[i - 1]) > 4) print ".PP\n" roff(text)
        else print roff(text)
    }
}

function attribute(name) {
    return match($0, " " name "=\"[^\"]*") ? substr($0, RSTART + length(name) + 3, RLENGTH - length(name) - 3) : ""
}

function member(name, what) {
    print ".SS " roff(name) "\n\\fB" roff(what) "\\fP\n.PP"
    body(2)
}

BEGIN {
    print ".TH ORG.CSID1 5 \"\" \"csid\" \"File Formats\"\n.SH NAME\norg.csid1 \\- D\\-Bus interface of csid"
}

/<!--/ { lines = 0; inside = 1; next }
/-->/ { inside = 0; if (!begun++) preamble(); next }
inside { comment[++lines] = $0; next }
/<interface / { print ".SH INTERFACE " roff(toupper(attribute("name"))); body(2) }
/<property / { member(attribute("name"), attribute("name") ": property " attribute("type") ", read-only") }
/<(method|signal) / { name = attribute("name"); takes = gives = ""; signal = /<signal / }
/<arg / {
    if (attribute("direction") == "out") gives = gives (gives == "" ? "" : ", ") attribute("name") " " attribute("type")
    else takes = takes (takes == "" ? "" : ", ") attribute("name") " " attribute("type")
}
/<\/(method|signal)>|<(method|signal) [^>]*\/>/ {
    member(name, (signal ? "signal " : "") name "(" takes ")" (gives == "" ? "" : " returns (" gives ")"))
}
END { print ".SH SEE ALSO\n.BR csid (8),\n.BR csictl (1),\n.BR libcsi (3)" }
