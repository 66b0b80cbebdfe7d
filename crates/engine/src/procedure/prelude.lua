-- Replacements of Lua library functions, installed before the library is frozen; see vm.rs.
-- After `watch()` the clock is checked in every step.
local watch = ...
local format, sort, move = string.format, table.sort, table.move
local original_tostring, maxComparisons, maxMoved = tostring, 2 ^ 22, 2 ^ 22

for _, name in { "find", "gmatch", "gsub", "match", "split" } do
    local search = string[name]
    string[name] = function(text, pattern, ...)
        if type(text) == "string" and type(pattern) == "string" then
            -- Upper bound for the search, which is a single step: it compares the whole pattern at
            -- each position of the text.
            local comparisons = #text * #pattern
            if comparisons > maxComparisons then
                error(`string.{name}: the text and the pattern are too long`, 2)
            end
            if comparisons > 2 ^ 16 then
                watch()
            end
        end
        return search(text, pattern, ...)
    end
end

table.move = function(from, first, last, ...)
    -- Non-numbers count as 0 here; `move` raises an error for them.
    local low, high = tonumber(first) or 0, tonumber(last) or 0
    -- Written so that NaN is rejected too: comparisons with NaN are false.
    if not (math.abs(low) < 2 ^ 31 and math.abs(high) < 2 ^ 31 and high - low < maxMoved) then
        error("table.move: too many elements to move", 2)
    end
    watch()
    return move(from, first, last, ...)
end

table.sort = function(list, less)
    return sort(list, less or function(a, b)
        return a < b
    end)
end

local addressed = { table = true, ["function"] = true, userdata = true, buffer = true, thread = true }

local function show(value)
    local kind = type(value)
    -- SQL errors; only the host creates userdata.
    if kind == "userdata" and typeof(value) == "error" then
        return original_tostring(value)
    end
    if addressed[kind] then
        local meta = getmetatable(value)
        if type(meta) ~= "table" or rawget(meta, "__tostring") == nil then
            return kind
        end
    end
    return original_tostring(value)
end

tostring = show

string.format = function(pattern, ...)
    local count = select("#", ...)
    local values = { ... }
    for index = 1, count do
        if addressed[type(values[index])] then
            values[index] = show(values[index])
        end
    end
    return format(pattern, unpack(values, 1, count))
end
